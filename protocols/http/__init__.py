"""The real transport: HTTP for messages on the one port, mutual TLS, and lanes for long bodies."""
