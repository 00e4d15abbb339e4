"""The `kvrelay` command. Nothing here imports torch: the command must answer at once."""
