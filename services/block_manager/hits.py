"""How much of the prompts was found in the cache, counted so that retries cannot inflate it."""

from __future__ import annotations

from typing import Final

from shared.recent import Recent

REMEMBERED: Final = 65_536


class HitCounter:
    """Counts each request id once, at its first admission: later attempts, and what they compute again, count nothing.

    So `prompt_tokens - hit_tokens` is what had to be computed for prompts.
    """

    def __init__(self) -> None:
        self.hit_tokens = self.prompt_tokens = 0
        self._counted: Recent[str] = Recent(REMEMBERED)

    def count(self, request_id: str, hit_tokens: int, prompt_tokens: int) -> None:
        if request_id in self._counted:
            return
        self._counted.add(request_id)
        self.hit_tokens += hit_tokens
        self.prompt_tokens += prompt_tokens
