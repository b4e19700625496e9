"""Programs that move bytes between two namespaces, to see how long that takes."""

from __future__ import annotations

TAKE = """
import socket, sys
with socket.create_server((sys.argv[1], 5001)) as server:
    print("listening", flush=True)
    with server.accept()[0] as link:
        while link.recv(1 << 20):
            pass
"""
GIVE = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001), timeout=20) as link:
    started = time.monotonic()
    link.sendall(bytes(int(sys.argv[2])))
    link.shutdown(socket.SHUT_WR)
    link.recv(1)  # until the other end has taken all
    print(time.monotonic() - started)
"""
