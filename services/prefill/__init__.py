"""The prefill actor: prompts become sealed pages and a first token."""
