"""For nodes that nobody can dial: a relay tells them who calls, and carries bytes for them."""
