"""Operations, one folder each; the kernels have the signature of the plain PyTorch version."""
