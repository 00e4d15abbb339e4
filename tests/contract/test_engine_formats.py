"""Every pair of KV formats through both engines, from the settings to the tokens, without actors.

The oracle is the reference backend behind the same engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from kernels import formats
from kernels.scale_file import write
from services.decode.batch import Sequence
from services.decode.engine import DecodeEngine, Report
from services.prefill.engine import Computed, Gone, PrefillEngine
from services.prefill.scheduler import Prompt
from shared.errors import Internal
from shared.messages import Sampling
from shared.models import calibration, files, runtime
from shared.models.files import ModelFiles
from shared.models.transformer import Transformer
from shared.pool.layout import cache_for, pages_for
from shared.sampling import Choice, Sampler
from shared.settings import BlockManagerSettings
from tests.support.tiny_models import folder

BLOCK, PROMPT, NEW = 16, 41, 24
NEAR = 0.1
"""Sums in another order move a few elements to the next code: log-probabilities this close are equal."""
PAIRS = list(itertools.product(formats.names(), repeat=2))


class Model(NamedTuple):
    files: ModelFiles
    cpu: Transformer
    reference: Transformer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("model")
    folder(path, "llama", num_hidden_layers=3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRELAY_CACHE_DIR", str(path / "cache"))
        prepared = files.prepare(str(path), "float32")
    yield Model(prepared, *(runtime.load(prepared, "float32", kernels, 1) for kernels in ("cpu", "reference")))


def prompt_tokens(length: int = PROMPT) -> list[int]:
    return [3 + (i * i * 7 + i) % 250 for i in range(length)]


class Cache:
    """Private pages of one sequence, as the settings make them, and both engines over them."""

    def __init__(self, model: Model, forward: Transformer, **settings: Any) -> None:
        self.layout, found = cache_for(model.files, BlockManagerSettings(**settings))
        self.scales = None if found is None else runtime.pool_scales(found, self.layout)
        self.memory = runtime.Memory.private(self.layout, 16, 1)
        self.config, self.forward = model.files.config, forward

    def sampler(self, tokens: list[int]) -> Sampler:
        sampling = Sampling(temperature=0.0, ignore_eos=True, logprobs=0)
        return Sampler(
            sampling, request_id="r", tokens=np.array(tokens), prompt_tokens=PROMPT, eos_token_ids=(),
            vocab_size=self.config.vocab_size, max_tokens=NEW, max_model_len=128,
        )  # fmt: skip

    def first(self, tokens: list[int]) -> Choice:
        """What prefill says after `tokens`, in chunks of two pages."""
        found: list[Computed | Gone] = []
        engine = PrefillEngine(self.forward, 2 * BLOCK, found.append, lambda: True, self.scales)
        engine.map(self.memory)
        table = np.arange(len(tokens) // BLOCK, dtype=np.int32)
        ids = np.array(tokens, dtype=np.int64)
        asked = Prompt(("r", 0), ids, table, table.astype(np.uint32), 0, 0, 0, BLOCK)
        engine.add(asked, self.sampler(tokens))
        while engine.step():
            pass
        last = found[-1]
        assert isinstance(last, Computed) and last.first is not None
        return last.first

    def generate(self) -> list[Choice]:
        """`NEW` tokens after the prompt: one of prefill, the others of decode."""
        tokens = prompt_tokens()
        first = self.first(tokens)
        sampler = self.sampler(tokens)
        sampler.accept(first.token)
        found: list[Report] = []
        engine = DecodeEngine(self.forward, 2, 128, BLOCK, found.append, lambda: True, self.scales)
        engine.map(self.memory)
        table = np.arange(PROMPT // BLOCK, dtype=np.int32)
        tail = tokens[len(table) * BLOCK :]
        sequence = Sequence(("r", 0), sampler, 0, 0, table, table.astype(np.uint32), tail, first.token)
        sequence.ready.extend((page, 0) for page in range(len(table), 8))
        engine.add(sequence)
        while engine.step():
            pass
        choices = [emission.choice for report in found for emission in report.emissions]
        assert None not in choices
        return [first, *(choice for choice in choices if choice is not None)]


@pytest.fixture(scope="module")
def scale_files(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of calibrated files, one for each pair that needs one."""
    where = tmp_path_factory.mktemp("scales")
    for k, v in PAIRS:
        pages = pages_for(model.files.config, "fp32", BlockManagerSettings(k_cache_dtype=k, v_cache_dtype=v))
        if pages.needs_scales:
            learned = calibration.calibrate(model.cpu, model.files.identity, [prompt_tokens(100)], pages)
            write(where / f"{k}-{v}.safetensors", learned)
    return where


def compare(ours: list[Choice], theirs: list[Choice]) -> int:
    """Length of the equal beginning; they may part only where the choice was a near-tie."""
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.logprob is not None and other.logprob is not None
        assert abs(one.logprob.logprob - other.logprob.logprob) < NEAR, (at, one, other)
        if one.token != other.token:
            return at
    return len(ours)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair_runs_as_the_reference_does(model: Model, scale_files: Path, pair: tuple[str, str]) -> None:
    k, v = pair
    path = scale_files / f"{k}-{v}.safetensors"
    chosen = {"k_cache_dtype": k, "v_cache_dtype": v, "kv_scales_path": path if path.exists() else None}
    ours, theirs = Cache(model, model.cpu, **chosen), Cache(model, model.reference, **chosen)
    assert (ours.layout.k_format, ours.layout.v_format) == pair
    emitted = ours.generate()
    assert len(emitted) == NEW
    assert compare(emitted, theirs.generate()) > 0
    if ours.scales is not None:
        assert ours.scales.stored > 0 and ours.scales.clipped_fraction < 0.01
    else:
        assert not path.exists()


def test_skipped_layers_run_and_change_the_page(model: Model) -> None:
    whole = Cache(model, model.cpu, kv_cache_dtype="int4")
    chosen = {"kv_cache_dtype": "int4", "kv_cache_dtype_skip_layers": ("first:1", "last:1")}
    ours, theirs = Cache(model, model.cpu, **chosen), Cache(model, model.reference, **chosen)
    assert ours.layout.skip_layers == (0, 2) and ours.layout.page_bytes > whole.layout.page_bytes
    assert compare(ours.generate(), theirs.generate()) > 0
    whole.generate()
    raw = Cache(model, model.cpu)
    raw.generate()
    first = raw.memory.layout.layer(1).offset  # layer 0 is not quantised in either
    pages, exact, quantised = (one.memory.pages[:2, :first] for one in (ours, raw, whole))
    assert pages.equal(exact) and not pages.equal(quantised)


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["fp32", "int8_channel", "int4"])
def test_what_is_no_number_ends_the_prompt_in_its_own_chunk(
    name: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder(tmp_path / "model", "llama")
    weights = load_file(tmp_path / "model" / "model.safetensors")
    for part in ("gate", "up"):  # whose product is infinite
        weights[f"model.layers.0.mlp.{part}_proj.weight"] *= 1e25
    save_file(weights, tmp_path / "model" / "model.safetensors")
    monkeypatch.setenv("KVRELAY_CACHE_DIR", str(tmp_path / "cache"))
    prepared = files.prepare(str(tmp_path / "model"), "float32")
    forward = runtime.load(prepared, "float32", kernels, 1)
    cache = Cache(Model(prepared, forward, forward), forward, kv_cache_dtype=name)
    tokens = prompt_tokens(3 * BLOCK)
    found: list[Computed | Gone] = []
    engine = PrefillEngine(forward, BLOCK, found.append, lambda: True)
    engine.map(cache.memory)
    table = np.arange(3, dtype=np.int32)
    prompt = Prompt(("r", 0), np.array(tokens), table, table.astype(np.uint32), 0, 0, 0, BLOCK)
    engine.add(prompt, cache.sampler(tokens))
    while engine.step():
        pass
    assert [type(one) for one in found] == [Gone]
    assert isinstance(found[0], Gone) and isinstance(found[0].error, Internal)
