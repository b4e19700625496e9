"""Training data before training: tokenizers, token folders, and where they are read from."""
