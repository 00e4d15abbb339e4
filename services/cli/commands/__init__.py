"""SEAM: one command a file, named after it; each defines `app`, a Typer with a single command or with its own."""
