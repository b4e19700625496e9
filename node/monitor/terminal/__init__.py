"""``node monitor``: the dashboard in a terminal, of a node, of a swarm, or of a log of events."""
