"""What a node tells of itself: events, the log on the terminal, the local API and metrics."""
