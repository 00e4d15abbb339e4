"""The HTTP door: OpenAI's API, health and metrics, served inside the gateway's own event loop."""
