"""Qwen2 and Qwen2.5: biases on q, k and v; an optional sliding window on the upper layers."""

from shared.models.architecture import Architecture

SPEC = Architecture(qkv_bias=True, sliding="upper", stop_tokens=("<|im_end|>", "<|endoftext|>"))
