"""Places that hold pages; one kind per file."""
