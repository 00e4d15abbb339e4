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
class Verdict:
    """`wrong` positions of a continuation chose another token although the reference was certain of its own."""

    certain: int
    wrong: tuple[int, ...]


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
def judge(prompt: str, continuation: tuple[int, ...]) -> Verdict:
    """Compares each token with the reference's greedy choice after the raw prompt and the tokens before it.

    One forward pass over prompt and continuation; as long as all choices agree it is the same as generating step by
    step, and behind a near-tie it judges the path that was taken.
    """
    model, tokenizer = _model()
    prompt_ids = tokenizer(prompt).input_ids
    ids = torch.tensor([[*prompt_ids, *continuation]])
    with torch.inference_mode():
        logits = model(ids).logits[0, len(prompt_ids) - 1 : -1]
    best = logits.topk(2)
    certain = best.values[:, 0] - best.values[:, 1] > CERTAIN
    wrong = certain & (best.indices[:, 0] != torch.tensor(continuation))
    return Verdict(int(certain.sum()), tuple(wrong.nonzero().flatten().tolist()))
