"""Hugging Face `transformers` in fp32 on the same weights: what greedy decoding must say, and where it is certain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

CERTAIN = 0.02
"""Logit margin below which two correct fp32 implementations may choose differently."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Water boils at a temperature of",
    "The three primary colours are red,",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam, I am writing to",
    "In 1969, the first human being walked on",
    "A good way to learn a new language is to",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef normalise(x):\n    return",
    "#include <stdio.h>\n\nint main(void) {\n    printf(",
    "SELECT name, age FROM users WHERE",
    "for i in range(10):\n    print(i",
    "中国的首都是",
    "今天的天气很好，我们",
    "人工智能是一门",
)


@dataclass(frozen=True)
class Reference:
    """`token_ids[:certain]` must be reproduced; the next choice was a near-tie (or all are certain)."""

    token_ids: tuple[int, ...]
    certain: int


@cache
def _model() -> tuple[object, object]:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from shared.models.files import demo_gguf

    gguf = demo_gguf()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    whole = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, quantization_config=whole).eval()
    return model, AutoTokenizer.from_pretrained(**source)


@cache
def greedy(prompt: str, new_tokens: int) -> Reference:
    """Greedy continuation of the raw prompt, up to `new_tokens`, ended early by the end-of-sequence token."""
    model, tokenizer = _model()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    past, chosen, certain = None, [], None
    with torch.inference_mode():
        for step in range(new_tokens):
            out = model(ids, past_key_values=past, use_cache=True)
            past = out.past_key_values
            best = out.logits[0, -1].topk(2)
            if certain is None and float(best.values[0] - best.values[1]) <= CERTAIN:
                certain = step
            chosen.append(int(best.indices[0]))
            if chosen[-1] == tokenizer.eos_token_id:
                break
            ids = best.indices[:1][None]
    return Reference(tuple(chosen), len(chosen) if certain is None else certain)
