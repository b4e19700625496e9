"""How large a swarm may be: what messages and the files of operators agree on.

Apart from :mod:`protocols.messages`, so that reading a configuration does not build every message.
"""

from __future__ import annotations

MAX_PEERS = 512  # members of one round, and islands one island keeps track of
MAX_ROSTER = 256  # members in office: with more, who merged what does not fit a certificate
MAX_FRAGMENTS = 12  # of one run: where an island stands with each is in its announcements
NO_BOUND = -1  # of staleness: nobody is waited for however many rounds it has missed
ENDLESS_ROUNDS = 1_000_000  # total_rounds of a run that only its operators end
