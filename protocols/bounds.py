"""How large a swarm may be: what messages and the files of operators agree on.

Apart from :mod:`protocols.messages`, so that reading a configuration does not build every message.
"""

from __future__ import annotations

MAX_PEERS = 512  # members of one round, and islands one island keeps track of
MAX_FRAGMENTS = 12  # of one run: where an island stands with each is in its announcements
ENDLESS_ROUNDS = 1_000_000  # total_rounds of a run that only its operators end
