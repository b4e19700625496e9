"""A run's manifest with its creator's signature: how it travels, and what a joiner checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from blake3 import blake3

from bootstrap.manifest import Manifest
from protocols.envelope import open_envelope, seal
from protocols.errors import BadSignature
from protocols.identity import Identity, PeerId
from protocols.messages import ManifestText

PURPOSE = "manifest"
NEVER = 253_402_300_800.0  # the year 10000: a run's description does not expire


@dataclass(frozen=True, slots=True)
class SignedManifest:
    """A manifest with the signature of the peer that created the run."""

    manifest: Manifest
    creator: PeerId
    data: bytes  # the envelope, as it is kept and passed on

    @property
    def run_id(self) -> bytes:
        """The run's 32 bytes."""
        return self.manifest.run_id

    @classmethod
    def create(cls, manifest: Manifest, identity: Identity) -> SignedManifest:
        """Sign a manifest; the envelope names the run, so it cannot pass for another's."""
        data = seal(
            identity,
            ManifestText(manifest.canonical()),
            purpose=PURPOSE,
            expires=NEVER,
            sequence=0,
            run=manifest.run_id,
        )
        return cls(manifest, identity.peer_id, data)

    @classmethod
    def open(cls, data: bytes, run: bytes) -> SignedManifest:
        """What a joiner does with a manifest it was sent: signature, hash, then schema.

        ``run`` is the id that was asked for.
        Raises :class:`~protocols.errors.RemoteProtocolError`: ``Malformed`` for what is not a
        manifest, ``Stale`` for another run's envelope, ``BadSignature`` for a wrong hash.
        """
        opened = open_envelope(
            data, ManifestText, purpose=PURPOSE, now=0.0, run=run, max_lifetime=math.inf
        )
        canonical = opened.message.canonical
        if blake3(canonical).digest() != run:
            raise BadSignature("the manifest's hash is not the run's id")
        return cls(Manifest.parse(canonical), opened.signer, data)
