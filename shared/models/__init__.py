"""Models on disk and in memory: configuration, weights, tokenizer, chat template, forward pass."""
