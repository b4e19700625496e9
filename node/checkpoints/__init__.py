"""What a node writes down and reads back: outer state, place in the chain, the trainer's files."""
