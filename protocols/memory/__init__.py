"""The transport of tests and simulations: one process, a simulated internet, virtual time."""
