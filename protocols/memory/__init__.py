"""The transport of tests: peers of one process, a simulated internet, virtual time."""
