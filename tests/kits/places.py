"""Where things of the repository are."""

from __future__ import annotations

from pathlib import Path

KITS = Path(__file__).resolve().parent
ROOT = KITS.parent.parent
