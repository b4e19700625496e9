"""Islands that meet in pairs, without rounds that are agreed on (docs/gossip.md)."""
