"""Moves pages: every copy between the pools and tiers of a node, in threads of its own."""
