"""Operations, one folder each; Triton kernels have the same signature as the PyTorch version."""
