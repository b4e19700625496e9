"""``python -m node.bench``: as ``node bench``, for programs that start many members."""

from __future__ import annotations

import json
import sys

from node.bench.command import main
from node.bench.member import Settings

if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    stages = bool(options.pop("stages", False))
    if "peers" in options:
        options["peers"] = tuple(options["peers"])
    sys.exit(main(Settings(**options), as_json=True, stages=stages))
