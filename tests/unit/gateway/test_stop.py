from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.stop import StopStrings


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition itself: character by character, longest stop string that ends here."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def run(deltas: list[str], stops: list[str]) -> tuple[str, str | None, list[str]]:
    matcher, pieces = StopStrings(tuple(stops)), []
    for delta in deltas:
        piece, stop = matcher.feed(delta)
        pieces.append(piece)
        if stop is not None:
            return "".join(pieces), stop, pieces
    pieces.append(matcher.flush())
    return "".join(pieces), None, pieces


@given(
    text=st.text(alphabet="ab€", max_size=40),
    stops=st.lists(st.text(alphabet="ab€", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 40), max_size=12),
)
def test_every_split_of_the_text_gives_what_the_definition_says(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    deltas = [text[a:b] for a, b in itertools.pairwise(edges)]
    got, stop, pieces = run(deltas, stops)
    want, want_stop = oracle(text, stops)
    assert (got, stop) == (want, want_stop)
    for n in range(len(pieces)):  # nothing that was shown had to be taken back
        assert want.startswith("".join(pieces[: n + 1]))


@given(text=st.text(alphabet="ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1))
def test_no_more_is_held_back_than_could_still_become_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopStrings(tuple(stops))
    _, stop = matcher.feed(text)
    if stop is None:
        possible = [n for n in range(len(text) + 1) if n == 0 or any(s.startswith(text[-n:]) for s in stops)]
        assert len(matcher.held) == max(possible)


def test_a_near_miss_is_emitted_whole() -> None:
    assert run(["foo\n", "\nUse", "d"], ["\n\nUser:"]) == ("foo\n\nUsed", None, ["foo", "", "\n\nUsed", ""])


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(("",))
