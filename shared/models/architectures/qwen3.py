"""Qwen3 (dense): RMS norms on q and k heads, no biases; an optional sliding window on the upper layers."""

from shared.models.architecture import Architecture

SPEC = Architecture(qk_norm=True, sliding="upper", head_dim=128, stop_tokens=("<|im_end|>", "<|endoftext|>"))
