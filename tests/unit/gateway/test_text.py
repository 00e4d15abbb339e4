from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.text import TextStream


class Utf8:
    """A detokenizer over a byte vocabulary: token = byte."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, token_ids: list[int]) -> str:
        self.held += bytes(token_ids)
        for cut in range(len(self.held), max(-1, len(self.held) - 4), -1):
            try:
                text, self.held = self.held[:cut].decode(), self.held[cut:]
                return text
            except UnicodeDecodeError:
                continue
        return ""

    def finish(self) -> str:
        text, self.held = self.held.decode(errors="replace"), b""
        return text


@given(text=st.text("ab€👩‍🚀", max_size=12), stop=st.text("ab€", min_size=1, max_size=3), step=st.integers(1, 5))
def test_text_is_cut_at_the_stop_string_whatever_the_tokens(text: str, stop: str, step: int) -> None:
    stream, tokens, got, used, found = TextStream(Utf8(), [stop]), list(text.encode()), "", 0, None
    for start in range(0, len(tokens), step):
        piece = stream.feed(tokens[start : start + step])
        got, used, found = got + piece.text, used + piece.used, piece.stop
        if found is not None:
            break
    else:
        piece = stream.flush()
        got, found = got + piece.text, piece.stop
    where = text.find(stop)
    assert got == (text if where < 0 else text[:where])
    assert found == (None if where < 0 else stop)
    assert used == len(tokens) if where < 0 else used == len(text[: where + len(stop)].encode())


def test_an_end_inside_a_character_gives_one_replacement_character() -> None:
    stream = TextStream(Utf8(), [])
    assert stream.feed(list("é".encode() + "€".encode()[:2])).text == "é"
    assert stream.flush().text == "\ufffd"


def test_a_stop_string_made_whole_by_the_flush() -> None:
    stream = TextStream(Utf8(), ["\ufffd"])
    assert stream.feed([0xE2, 0x82]).text == ""
    assert stream.flush().stop == "\ufffd"


def test_stop_strings_wait_for_min_tokens() -> None:
    stream = TextStream(Utf8(), ["a"], min_tokens=2)
    assert stream.feed([97]).text == "a"
    assert stream.feed([97]).text == "a"
    assert stream.feed([98, 97, 97]).stop == "a"
