"""Which variants of the Triton kernels both engines would have compiled, by when: run as a program, without a GPU.

The compiler and the launch are left out. What is left is what Triton itself does with the arguments of every call, for
a GPU of 132 multiprocessors; the numbers that come out of the model mean nothing.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kernels import dispatch
from kernels.triton import _passes
from services.decode.batch import Sequence
from services.decode.engine import DecodeEngine
from services.prefill.engine import PrefillEngine
from services.prefill.scheduler import Prompt
from shared.messages import Sampling
from shared.models import files, runtime
from shared.models.graphs import DecodeGraphs
from shared.models.transformer import Transformer
from shared.pool import shm
from shared.pool.layout import geometry, layout_for
from shared.sampling import Sampler
from shared.settings import BlockManagerSettings
from tests.support import recorded_graphs
from tests.support.tiny_models import VOCABULARY, folder

CONTEXT, BLOCK, ROWS = 8192, 16, 12
compiled: list[str] = []


class Gpu:
    """As much of a driver as the choice of a variant needs."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class Kernel:
    """Does nothing when it is launched."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        return

    def run(self, *arguments: Any) -> None:
        return


def compile_nothing(self: Any, key: str, signature: Any, device: int, *rest: Any) -> Kernel:
    compiled.append(f"{self.fn.__name__} {key}")
    kernel = self.device_caches[device][0][key] = Kernel()
    return kernel


def sampler() -> Sampler:
    return Sampler(
        Sampling(temperature=0.0, ignore_eos=True), request_id="r", tokens=(), prompt_tokens=0, eos_token_ids=(),
        vocab_size=VOCABULARY, max_tokens=99, max_model_len=CONTEXT,
    )  # fmt: skip


def prefill(engine: PrefillEngine) -> None:
    """Prompts of many lengths, with and without a cached beginning, in chunks."""
    for length in (1, 15, 16, 17, 100, 333, 512, 1000, 3001, 8000):
        table = np.arange(length // BLOCK, dtype=np.int32) % 8
        for cached in {0, (length - 1) // BLOCK // 2 * BLOCK, (length - 1) // BLOCK * BLOCK}:
            tokens, generations = np.zeros(length, np.int64), np.zeros(len(table), np.uint32)
            engine.add(Prompt(("r", 0), tokens, table, generations, 0, 0, cached, BLOCK), sampler())
            while engine.step():
                pass


def decode(engine: DecodeEngine) -> None:
    """Batches of every size, of sequences short and long, with and without pages in common."""
    for pages in (0, 1, 3, 16, 100, 400, 511):
        for at in range(ROWS):
            table = np.arange(pages, dtype=np.int32) % 8
            zeros = np.zeros(pages if at % 2 else 0, np.uint32)
            engine.add(Sequence(("r", at), sampler(), at, 0, table[: len(zeros)], zeros, [], 1))
            engine._forward(engine.batch.begin())
            engine.batch.undo_begin()
        for at in range(ROWS):
            engine.drop(("r", at))


def main(where: Path, kv_cache_dtype: str, role: str) -> None:
    """Prints how many were compiled before the engine was ready, and which ones later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_CACHE_DIR", str(where / "cache"))
        patch.setenv("KVRELAY_SHM_DIR", str(where))
        patch.setattr(_passes, "multiprocessors", lambda device: 132)
        patch.setattr(JITFunction, "_do_compile", compile_nothing)
        driver.set_active(Gpu())
        folder(where / "model", "llama", max_position_embeddings=CONTEXT, num_hidden_layers=18)
        prepared = files.prepare(str(where / "model"), "bfloat16")
        layout = layout_for(prepared, BlockManagerSettings(kv_cache_dtype=kv_cache_dtype))
        pool = shm.create("p", where, layout, 8, ROWS)
        memory = runtime.Memory(torch.from_numpy(pool.pages), torch.from_numpy(pool.tails), geometry(layout), pool)
        ops = dispatch.Ops("triton")
        argmax_rows = ops.argmax_rows
        patch.setattr(ops, "argmax_rows", lambda logits: argmax_rows(logits).zero_())  # some token that exists
        model = Transformer(prepared, "bfloat16", ops, 1)
        if role == "decode":
            recorded_graphs.install(patch)
            model._graphs = DecodeGraphs(torch.device("cpu"), model._compute)
            decoding = DecodeEngine(model, ROWS, CONTEXT, BLOCK, lambda report: None, lambda: True)
            decoding.warm_up(layout, VOCABULARY)
            decoding.map(memory)
            ready = len(compiled)
            decode(decoding)
        else:
            prefilling = PrefillEngine(model, 512, lambda event: None, lambda: True)
            prefilling.warm_up(layout, VOCABULARY)
            prefilling.map(memory)
            ready = len(compiled)
            prefill(prefilling)
        print(json.dumps({"ready": ready, "later": compiled[ready:]}))
        pool.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
