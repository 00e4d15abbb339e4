"""Processes of the pipeline: one package an actor, and the command line."""
