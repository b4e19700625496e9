"""The drivers of certified rounds: a chain of rounds for each fragment, and what peers may ask."""
