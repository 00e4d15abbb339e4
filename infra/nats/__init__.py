"""The embedded NATS server: its roles, its configuration and its process."""
