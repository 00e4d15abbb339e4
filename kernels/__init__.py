"""KV-cache kernels: layouts, formats and ops; import the submodule you need."""

__version__ = "0.0.0"
