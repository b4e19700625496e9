"""One machine of the swarm: command line, daemon, trainer ranks, monitor."""

__version__ = "0.1.0"
