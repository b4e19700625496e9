"""The optimizer as pure functions over tensors. Start with :mod:`diloco.loop`."""
