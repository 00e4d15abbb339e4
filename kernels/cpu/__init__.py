"""Native CPU ops: C11 sources, compiled on first use for this machine (`build.py`), called through ctypes."""
