"""`python -m services.block_manager`"""

from services.block_manager.actor import BlockManager
from shared.run import run_actor

if __name__ == "__main__":
    run_actor(BlockManager)
