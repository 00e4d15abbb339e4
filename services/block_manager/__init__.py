"""Owns the memory of a node's pools and decides who may use which page of it."""
