"""The decode actor: the continuous batch."""
