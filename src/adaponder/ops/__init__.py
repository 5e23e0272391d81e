"""Operations, one folder each; every implementation has the signature of the plain PyTorch version."""
