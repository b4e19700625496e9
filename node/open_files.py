"""How many files this process may have open: each connection is one, and so is each checkpoint."""

from __future__ import annotations

import contextlib
import resource

MOST = 10_240  # what macOS allows; more than all connections and checkpoints of a node need


def raise_limit() -> int:
    """Raise the soft limit to what the hard one allows; returns the limit that holds now.

    Systems begin processes with a soft limit of 256 to 1024, for programs that use ``select``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may refuse any change
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return MOST if soft == resource.RLIM_INFINITY else soft
