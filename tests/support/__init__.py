"""Real counterparts for tests: a collector, a clock to move, actors in a line."""
