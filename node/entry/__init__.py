"""On the way into a run: which run, who is there, whose state, and how others reach this node."""
