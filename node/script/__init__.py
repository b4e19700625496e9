"""The swarm for a training script of one's own: ``island = node.join(model, optimizer)``."""
