"""`python -m services.decode`"""

from __future__ import annotations

from shared.actor import Actor
from shared.run import run_worker
from shared.settings import DecodeSettings


def find_actor() -> type[Actor]:
    from services.decode.actor import DecodeActor

    return DecodeActor


if __name__ == "__main__":
    run_worker(DecodeSettings, find_actor)
