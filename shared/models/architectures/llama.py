"""Llama 2, 3, 3.1, 3.2, SmolLM, SmolLM2, and in GGUF also Mistral, whose converter uses this name."""

from shared.models.architecture import Architecture

SPEC = Architecture(gguf_interleaved_rope=True, stop_tokens=("<|eot_id|>", "<|eom_id|>", "<|im_end|>"))
