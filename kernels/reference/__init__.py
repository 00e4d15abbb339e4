"""The ops in plain torch: slow, obvious, on any device. They are the contract that the fast backends are tested
against."""
