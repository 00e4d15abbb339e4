"""Plain torch versions of every op: the contract and the oracle of the fast ones."""
