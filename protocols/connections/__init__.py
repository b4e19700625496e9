"""Sockets as both ends of a connection need them: names, the port, TLS, encrypted frames."""
