"""What runs around the actors: the embedded NATS server, the demo, benchmarks, deployment files."""
