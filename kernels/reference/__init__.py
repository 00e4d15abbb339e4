"""The ops in plain torch: slow, obvious, on any device. The fast backends are tested against them."""
