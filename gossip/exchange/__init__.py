"""Moving tensors: slices to owners, merged parts back to all; and what is kept of it for others."""
