"""Triton kernels: the ops of `kernels/reference` on NVIDIA GPUs. They also run in Triton's interpreter on CPU tensors
(`TRITON_INTERPRET=1` before the first import), slowly, which is how they are tested without a GPU."""
