"""Mistral 7B and Nemo: Llama with an optional sliding window on every layer."""

from shared.models.architecture import Architecture

SPEC = Architecture(gguf_interleaved_rope=True, sliding="all")
