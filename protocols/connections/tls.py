"""Mutual TLS 1.3 in which a node's ed25519 key is its whole identity.

There is no authority to trust. TLS libraries insist on one, so every certificate is signed by a
certificate authority whose private key stands in this file: its signature proves nothing and is
not meant to. What proves the identity is TLS's own CertificateVerify message (RFC 8446, section
4.4.3), which both ends send and which only the holder of the key in the certificate can make.

Which peer is expected travels in the server name, ``<base32 of the public key>.peer``, as far as
:class:`PeerSSLObject`, which compares it with the key that was proven before the handshake counts
as done, so that no byte of ours is sent to anybody else. The server side reads ``peer_id`` from
the same object. The server name is visible to those who watch the line, as the two addresses are.

Certificates are valid from 1970 to 9999: a wrong clock must not keep a peer out.
"""

from __future__ import annotations

import base64
import datetime
import functools
import hashlib
import os
import socket
import ssl
import tempfile
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.x509.oid import NameOID

from protocols.connections.sealing import KEY_BYTES, Broken, Opener, Sealer
from protocols.errors import Malformed
from protocols.identity import Identity, PeerId, peer_id_of, public_key

LANE = b"\xa7lane"  # in front of a key; no request and no answer of HTTP begins so
ANYONE = "anyone.peer"  # server name for a dial that learns who answers
_REFUSALS = ("CERTIFICATE", "UNKNOWN_CA", "ACCESS_DENIED", "DECRYPT_ERROR", "HANDSHAKE_FAILURE")

_CA_KEY = Ed25519PrivateKey.from_private_bytes(
    hashlib.sha256(b"atoll: the private key of this authority is public").digest()
)
_NOT_BEFORE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NOT_AFTER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
_CA_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Atoll, an authority of no trust")])


class WrongPeer(ssl.SSLCertVerificationError):
    """The handshake proved another key than the server name asked for."""

    def __init__(self, expected: str, got: PeerId) -> None:
        super().__init__(1, f"expected {expected}, {got} answered")
        self.got = got


class PeerSSLObject(ssl.SSLObject):
    """A TLS connection that knows, once the handshake is done, whose key was proven."""

    peer_id: PeerId

    def do_handshake(self) -> None:
        """As in the base class; then read the peer's key and compare it with the server name.

        Raises :class:`WrongPeer`, or ``ssl.SSLCertVerificationError`` if the certificate holds no
        ed25519 key. asyncio drops the connection on any ``ssl.SSLError`` from here.
        """
        super().do_handshake()  # raises SSLWantReadError until the last flight
        self.peer_id = _proven(self)


class PeerSSLSocket(ssl.SSLSocket):
    """The same on a socket of one's own, for lanes: TLS, and behind it sealed frames.

    Each end first sends, inside TLS, :data:`LANE` and the key of its frames, which then bypass TLS
    (:mod:`protocols.connections.sealing`). So only the other end of the handshake can read them.
    The word shows that a key follows: an attacker can change the preamble, so that one end takes
    for a lane what the other one means as a call, and the first bytes of a call are no secret.
    """

    peer_id: PeerId
    heard = 0  # bytes of frames that have come

    _own_first = b""
    _sealer: Sealer | None = None
    _frame = memoryview(b"")  # what the socket has not taken yet of the piece under way
    _their_first = b""
    _opener: Opener | None = None

    def do_handshake(self, block: bool = False) -> None:
        """As :meth:`PeerSSLObject.do_handshake`."""
        super().do_handshake(block)
        self.peer_id = _proven(self)

    def send(self, data: Any, flags: int = 0) -> int:
        """Send ``data`` sealed, as one frame: all of it, or BlockingIOError.

        After an error that says to wait the same ``data`` has to be given again, as with OpenSSL.
        """
        if self._sealer is None:
            self._own_first = self._own_first or LANE + os.urandom(KEY_BYTES)
            super().send(self._own_first, flags)  # all or nothing
            self._sealer = Sealer(self._own_first[len(LANE) :])
        piece = memoryview(data)
        self._frame = self._frame or self._sealer.seal(piece)
        while self._frame:
            self._frame = self._frame[socket.socket.send(self, self._frame, flags) :]
        return len(piece)

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fill ``buffer`` from at most one frame. Raises as sockets do; 0 is the end."""
        if self._opener is None:
            while left := len(LANE) + KEY_BYTES - len(self._their_first):
                more = super().recv(left, flags)
                if not more:
                    return 0
                self._their_first += more
            if not self._their_first.startswith(LANE):
                raise Broken("the other end does not mean a lane")
            self._opener = Opener(self._their_first[len(LANE) :])
        view = memoryview(buffer)
        while not (count := self._opener.open(view)):
            came = socket.socket.recv_into(self, self._opener.room(), 0, flags)
            if not came:
                return 0
            self._opener.took(came)
            self.heard += came
        return count

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Bytes as they came, sealed or not: for callers that expect none."""
        if self._opener is None:
            return super().recv(buflen, flags)
        return socket.socket.recv(self, buflen, flags)


def _proven(link: ssl.SSLObject | ssl.SSLSocket) -> PeerId:
    """Whose key the handshake proved; raises :class:`WrongPeer` if it is not the expected one."""
    peer = _peer_of(link.getpeercert(binary_form=True))
    expected = link.server_hostname or ""
    if not link.server_side and expected not in (ANYONE, server_name(peer)):
        raise WrongPeer(expected, peer)
    return peer


def tls_reason(error: ssl.SSLError) -> str:
    """What OpenSSL says, in small letters."""
    return (getattr(error, "reason", None) or "").lower().replace("_", " ")


def is_refusal(error: ssl.SSLError) -> bool:
    """Whether an error on an open connection says that our identity is not accepted.

    With TLS 1.3 that comes after the client's handshake. Any other means that bytes were changed
    on their way: as good as a reset.
    """
    said = getattr(error, "reason", None) or ""
    return any(word in said for word in _REFUSALS)


@functools.lru_cache(maxsize=4096)
def server_name(peer: PeerId) -> str:
    """The TLS server name of a peer; raises :class:`~protocols.errors.Malformed`."""
    raw = public_key(peer).public_bytes_raw()
    return base64.b32encode(raw).decode().rstrip("=").lower() + ".peer"


def peer_of_name(name: str) -> PeerId:
    """The peer a server name asks for; raises :class:`~protocols.errors.Malformed`."""
    label = name.partition(".")[0].upper()
    try:
        raw = base64.b32decode(label + "=" * (-len(label) % 8))
        return peer_id_of(Ed25519PublicKey.from_public_bytes(raw))
    except ValueError as error:
        raise Malformed("not the server name of a peer") from error


def server_context(identity: Identity) -> ssl.SSLContext:
    """For the listening side: proves ``identity`` and demands a proof of every client."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, identity)
    context.num_tickets = 0  # a resumed session would skip the proof
    context.options |= ssl.OP_NO_TICKET
    return context


def client_context(identity: Identity) -> ssl.SSLContext:
    """For the dialling side; whom to expect is said by the server name of each connection."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, identity)


def certificate(identity: Identity) -> x509.Certificate:
    """A certificate of the identity's public key under the well-known authority."""
    public = identity.key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id)]))
        .issuer_name(_CA_NAME)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(server_name(identity.peer_id))]),
            critical=False,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_CA_KEY.public_key()),
            critical=False,
        )
        .sign(_CA_KEY, None)
    )


def authority() -> x509.Certificate:
    """The certificate of the authority, the same bytes everywhere."""
    public = _CA_KEY.public_key()
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    return (
        x509.CertificateBuilder()
        .subject_name(_CA_NAME)
        .issuer_name(_CA_NAME)
        .public_key(public)
        .serial_number(1)
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .sign(_CA_KEY, None)
    )


def _context(protocol: int, identity: Identity) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # PeerSSLObject compares the key itself
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(
        cadata=authority().public_bytes(serialization.Encoding.PEM).decode()
    )
    context.sslobject_class = PeerSSLObject
    context.sslsocket_class = PeerSSLSocket
    load_chain(context, certificate(identity), identity.key)
    return context


def load_chain(context: ssl.SSLContext, leaf: x509.Certificate, key: Ed25519PrivateKey) -> None:
    """Give ``context`` its certificate and key; raises ``ssl.SSLError`` if they disagree.

    Python's ssl reads keys from files only, so the key passes through a private directory,
    encrypted with a password that never leaves this function.
    """
    password = os.urandom(24).hex().encode()
    pem = leaf.public_bytes(serialization.Encoding.PEM) + key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
        file = Path(folder) / "chain.pem"
        file.write_bytes(pem)
        context.load_cert_chain(file, password=password)


def _peer_of(der: bytes | None) -> PeerId:
    try:
        key = x509.load_der_x509_certificate(der or b"").public_key()
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ssl.SSLCertVerificationError(1, "the certificate does not parse") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ssl.SSLCertVerificationError(1, "the certificate holds no ed25519 key")
    return peer_id_of(key)
