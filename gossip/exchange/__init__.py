"""Moving the tensors of one round: slices to their owners, merged parts back to everybody."""
