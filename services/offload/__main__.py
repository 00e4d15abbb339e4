"""`python -m services.offload`"""

from services.offload.actor import Offload
from shared.run import run_actor

if __name__ == "__main__":
    run_actor(Offload)
