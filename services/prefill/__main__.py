"""`python -m services.prefill`"""

from __future__ import annotations

from shared.actor import Actor
from shared.run import run_worker
from shared.settings import PrefillSettings


def find_actor() -> type[Actor]:
    from services.prefill.actor import PrefillActor

    return PrefillActor


if __name__ == "__main__":
    run_worker(PrefillSettings, find_actor)
