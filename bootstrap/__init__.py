"""How a newcomer gets in: seeds, the DHT, the manifest, admission and the state download."""
