"""Numbers that JSON does not have, in a ``config.json``: infinite ones, and NaN.

The ``transformers`` library writes ``{"__float__": "Infinity"}`` from release 5 on, and a bare
``Infinity`` before, which is no JSON. Both are read; the first is what is written, so that neither
a manifest nor an export has what only Python reads.
"""

from __future__ import annotations

import json
import math
from typing import Any

TAG = "__float__"
NUMBERS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read(text: str) -> Any:
    """What a JSON text holds, with numbers in the place of their tags."""
    return json.loads(text, object_hook=_number)


def tagged(plain: Any) -> Any:
    """What a JSON text holds, with tags in the place of such numbers."""
    return json.loads(json.dumps(plain), parse_constant=lambda name: {TAG: name})


def _number(found: dict[str, Any]) -> Any:
    name = found.get(TAG) if len(found) == 1 else None
    return NUMBERS.get(name, found) if isinstance(name, str) else found
