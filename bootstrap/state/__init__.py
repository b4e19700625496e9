"""State for newcomers: the outer state in chunks from several peers, and small blobs by hash.

The outer state is some float32 vectors, ``base`` and those that the outer optimizer keeps (none,
one or two of its length). Its digest, which announcements and certificates carry, is a hash over
the hashes of fixed chunks, so that each chunk can come from another peer and be checked as it
arrives (:mod:`bootstrap.state.digest`). A peer that is asked for a state keeps a copy of it for
the time of the download, and goes on training (:mod:`bootstrap.state.server`). The newcomer pulls
from all who have it at once (:mod:`bootstrap.state.download`).

>>> states = StateServer(transport, run, lambda f: (round, vectors), still=still, offload=f)
>>> wanted = WantedState(run, round, digest)
>>> await download_state(transport, Sources(peers), wanted, vectors)
"""

from bootstrap.state.blobs import BlobServer, fetch_blob, fetch_manifest
from bootstrap.state.chunks import Came, DownloadProgress, Served
from bootstrap.state.digest import chunk_size, state_digest
from bootstrap.state.download import Download, NoSourceError, Sources
from bootstrap.state.moments import Moments, MomentsServer, download_moments, offered_moments
from bootstrap.state.outer_state import Fellows, WantedState, download_state
from bootstrap.state.partial import PartialState
from bootstrap.state.server import StateServer
from bootstrap.state.sharing import Sharing

__all__ = [
    "BlobServer",
    "Came",
    "Download",
    "DownloadProgress",
    "Fellows",
    "Moments",
    "MomentsServer",
    "NoSourceError",
    "PartialState",
    "Served",
    "Sharing",
    "Sources",
    "StateServer",
    "WantedState",
    "chunk_size",
    "download_moments",
    "download_state",
    "fetch_blob",
    "fetch_manifest",
    "offered_moments",
    "state_digest",
]
