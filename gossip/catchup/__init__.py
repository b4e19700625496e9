"""How a node that is behind comes to the state of the others."""
