"""The outer state of a fragment at this node, and what a mode's rounds do to it."""
