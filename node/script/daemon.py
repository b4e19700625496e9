"""Process entry of the node that a script starts: ``python -m node.script.daemon``.

It inherits one end of a socket pair and the shared vectors from the script, reads its settings
from standard input, and does from there on what ``node start`` does. When the script ends, it
leaves the swarm in order.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from contextlib import suppress

from bootstrap.manifest import Manifest
from node import outermost
from node.config import resolve
from node.interrupts import clean_up_first
from node.script.attached import Script
from node.script.fingerprint import Fingerprint
from node.script.session import ended
from node.trainer.framing import frame
from node.trainer.rank import die_with
from node.trainer.settings import EXIT_ORPHANED
from node.trainer.shared import SharedVectors


def main(arguments: list[str]) -> int:
    """Run the node to its end; its exit status. The script is told of an error that ends it."""
    channel, vectors, parent = (int(argument) for argument in arguments[:3])
    # A clean farewell, as after Ctrl-C. The channel's end may have told of it just before, and
    # this signal, unlike all others, does not hurry up a node that is leaving already.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    if not die_with(parent, signal.SIGHUP):
        return EXIT_ORPHANED
    clean_up_first()
    line = socket.socket(fileno=os.dup(channel))  # the daemon closes the other one when it leaves
    place: list[str] = []
    try:
        from node.daemon import run

        order = json.load(sys.stdin)
        place = [f"--dir={order['config']['dir']}"] if "dir" in order["config"] else []
        manifest = Manifest.parse(order["manifest"].encode()) if order["manifest"] else None
        script = Script(
            socket.socket(fileno=channel),
            SharedVectors(vectors, order["size"]),
            order["layout"],
            Fingerprint(**order["frozen"]),
        )
        return run(resolve(order["config"], os.environ), manifest, script)
    except Exception as error:  # noqa: BLE001 - the last resort: the script is told, the log has it
        status = outermost.report(error, place)
        told = ended(outermost.first_known(error, place))
        with suppress(OSError):  # it has gone itself
            line.sendall(frame(told))
        return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
