"""How islands agree: membership, matchmaking, the all-reduce, certificates and catching up."""
