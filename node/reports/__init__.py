"""What the monitor is told of rounds, exchanges, peers and links."""
