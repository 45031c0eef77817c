"""A dry run: the real Engine as one rank of many, on tensors that have shapes and no values."""
