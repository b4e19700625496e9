"""Who a peer is: an ed25519 key, and the peer id that is its public half.

A :data:`PeerId` is the base58 text of libp2p's identity multihash of the public key
(``12D3KooW…``), the form :class:`hivemind.p2p.PeerID` prints, so the key can be read back out
of the id and no directory of keys is needed.
"""

from __future__ import annotations

import errno
import os
from functools import lru_cache
from pathlib import Path
from typing import NewType

import base58
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocols.errors import BadSignature, Malformed, OperatorError, reason

PeerId = NewType("PeerId", str)

# identity multihash (0x00), 36 bytes; protobuf: key type 1 (ed25519), 32 bytes of key
_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_RAW_BYTES = len(_PREFIX) + 32

REMEMBERED = 16384  # signatures that were verified, 100 bytes each

# of the system's errors, those that say that the path is no place for a file
_NO_PLACE = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ENOTDIR,
    errno.EEXIST,  # a file where a directory is to be
    errno.ELOOP,
)


class Identity:
    """A private key and the peer id it proves."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.key = key
        self.peer_id = peer_id_of(key.public_key())

    @classmethod
    def generate(cls) -> Identity:
        """A new random identity."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """The identity of 32 known bytes: for tests and simulation."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file; raises :class:`OperatorError` E104 if it is unreadable or exposed."""
        try:
            mode = path.stat().st_mode
            data = path.read_bytes()
            key = serialization.load_pem_private_key(data, password=None)
        except OSError as error:
            why = reason(error)
            raise _bad_key(path, why, "give a readable key file with --identity") from error
        except (ValueError, TypeError) as error:
            raise _bad_key(
                path, "it is not an unencrypted PEM private key", "make one with: node keygen"
            ) from error
        if not isinstance(key, Ed25519PrivateKey):
            raise _bad_key(path, "it is not an ed25519 key", "make one with: node keygen")
        if mode & 0o077:
            raise _bad_key(path, "other users can read it", f"chmod 600 {path}")
        return cls(key)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Read the key file, or write a new one there with mode 0600.

        Raises :class:`OperatorError` E104 for one that is unreadable or exposed, or a path where
        there cannot be one; OSError where the disk is full or broken.
        """
        try:
            if path.exists():
                return cls.load(path)
            identity = cls.generate()
            identity.save(path)
        except OSError as error:
            if error.errno not in _NO_PLACE:
                raise
            why = reason(error)
            raise _bad_key(path, why, "give another path with --identity") from error
        return identity

    def save(self, path: Path) -> None:
        """Write the key as PEM (PKCS 8), mode 0600; never overwrites (``FileExistsError``)."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        text = self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:  # a full disk: half a key would be in the way of the next start
            path.unlink()
            raise

    def sign(self, data: bytes) -> bytes:
        """64 bytes of ed25519 signature."""
        return self.key.sign(data)


def peer_id_of(key: Ed25519PublicKey) -> PeerId:
    """The peer id of a public key."""
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return PeerId(base58.b58encode(_PREFIX + raw).decode())


def is_raw_id(raw: bytes) -> bool:
    """Whether these are the bytes of a peer id, as its base58 text stands for them."""
    return len(raw) == _RAW_BYTES and raw.startswith(_PREFIX)


def public_key(peer: PeerId) -> Ed25519PublicKey:
    """The key inside a peer id; raises :class:`Malformed`."""
    if len(peer) > 64:
        raise Malformed("not a peer id")
    try:
        raw = base58.b58decode(peer)
    except ValueError as error:
        raise Malformed("not a peer id") from error
    if not is_raw_id(raw) or base58.b58encode(raw).decode() != peer:  # b58decode strips spaces
        raise Malformed("not the id of an ed25519 key")
    return Ed25519PublicKey.from_public_bytes(raw[len(_PREFIX) :])


_known_key = lru_cache(maxsize=1024)(public_key)
_verified: dict[bytes, None] = {}  # hashes of signer, signature and what is signed


def verify(peer: PeerId, signature: bytes, data: bytes) -> None:
    """Raise :class:`BadSignature` unless ``peer`` signed ``data``.

    What was found to hold once holds for ever: the newest :data:`REMEMBERED` are not computed
    again. A vote, for one, is met as such and in the certificates that contain it.
    """
    who = peer.encode("utf-8", "surrogatepass")
    name = blake3(b"%d %d " % (len(who), len(signature)) + who + signature + data).digest()
    if name in _verified:
        return
    try:
        _known_key(peer).verify(signature, data)
    except (InvalidSignature, Malformed) as error:
        raise BadSignature(f"not signed by {peer}") from error
    if len(_verified) >= REMEMBERED:
        _verified.clear()
    _verified[name] = None


def _bad_key(path: Path, why: str, fix: str) -> OperatorError:
    return OperatorError("E104", f"cannot use the identity file {path}", why, fix, exit_code=2)
