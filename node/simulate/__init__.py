"""Whole swarms in one process: real tensors and text, a virtual clock, a simulated network."""
