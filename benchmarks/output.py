"""Where a benchmark writes its figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write(result: object, where: str) -> None:
    """Write ``result`` as JSON into a file; ``-``: to standard output."""
    text = json.dumps(result, indent=1) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")
