"""Starts a gateway: `python -m services.gateway`."""

from services.gateway.actor import Gateway
from shared.run import run_actor

if __name__ == "__main__":
    run_actor(Gateway)
