"""SEAM: one file per architecture, found by its file name; a file says what differs from Llama.

A file defines `SPEC: Architecture` (see `shared.models.architecture`). Its stem is the `model_type` of Hugging Face's
config.json and the `general.architecture` of GGUF.
"""
