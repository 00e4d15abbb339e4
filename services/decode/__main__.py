"""`python -m services.decode`"""

from __future__ import annotations

import sys

from shared import compute_environment, settings
from shared.errors import KvrelayError
from shared.settings import DecodeSettings

if __name__ == "__main__":
    try:
        chosen = settings.load(DecodeSettings)
    except KvrelayError as error:
        print(f"decode: {error}", file=sys.stderr)
        sys.exit(2)
    compute_environment.prepare(chosen.threads or compute_environment.usable_cores())  # before torch is imported
    from services.decode.actor import DecodeActor
    from shared.run import run_actor

    run_actor(DecodeActor, chosen)
