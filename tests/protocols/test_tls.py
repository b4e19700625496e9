"""Mutual TLS with the node key as identity: who gets in, who does not, and when it shows."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.x509.oid import NameOID

from protocols.connections import tls
from protocols.errors import IdentityMismatch, Malformed, TransportError, Unreachable
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits

A, B, M = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))


class Server:
    """A TLS server that notes whom it met and every byte it was told."""

    def __init__(self) -> None:
        self.peers: list[PeerId] = []
        self.heard = bytearray()
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.peers.append(writer.get_extra_info("ssl_object").peer_id)
        try:
            while data := await reader.read(1000):
                self.heard += data
                writer.write(data)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()


@asynccontextmanager
async def serving(context: ssl.SSLContext) -> AsyncIterator[Server]:
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    server.port = listener.sockets[0].getsockname()[1]
    async with listener:
        yield server


async def say(port: int, context: ssl.SSLContext, name: str, data: bytes = b"secret") -> PeerId:
    """Connect, send, wait for the echo; returns the id the handshake proved."""
    async with asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname=name
        )
        try:
            writer.write(data)
            assert await reader.readexactly(len(data)) == data
            peer: PeerId = writer.get_extra_info("ssl_object").peer_id
            return peer
        finally:
            writer.transport.abort()


REFUSED = (ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)


async def test_both_ends_learn_who_the_other_is() -> None:
    async with serving(tls.server_context(A)) as server:
        assert (
            await say(server.port, tls.client_context(B), tls.server_name(A.peer_id)) == A.peer_id
        )
        assert await say(server.port, tls.client_context(B), tls.ANYONE) == A.peer_id
    assert server.peers == [B.peer_id, B.peer_id]


async def test_no_session_is_given_out_to_be_resumed() -> None:
    """Who resumes one proves nothing: it would be taken for whoever began it."""
    async with serving(tls.server_context(A)) as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(
            "127.0.0.1",
            server.port,
            ssl=tls.client_context(B),
            server_hostname=tls.server_name(A.peer_id),
        )
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x"  # tickets come before the first of its bytes
        session = writer.get_extra_info("ssl_object").session
        assert session is None or not session.has_ticket
        writer.transport.abort()


async def test_another_key_than_the_expected_is_refused_before_a_byte() -> None:
    async with serving(tls.server_context(A)) as server:
        with pytest.raises(tls.WrongPeer) as error:
            await say(server.port, tls.client_context(B), tls.server_name(M.peer_id))
    assert error.value.got == A.peer_id
    assert not server.heard


async def test_a_man_in_the_middle_needs_the_key() -> None:
    """He terminates TLS with a key of his own under the public authority, name of A and all."""
    forged = _certificate_for(M, name=A.peer_id, server=tls.server_name(A.peer_id))
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    tls.load_chain(context, forged, M.key)
    async with serving(context) as middle:
        with pytest.raises(tls.WrongPeer) as error:
            await say(middle.port, tls.client_context(B), tls.server_name(A.peer_id))
    assert error.value.got == M.peer_id
    assert not middle.heard


async def test_a_client_without_a_certificate_is_refused() -> None:
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    async with serving(tls.server_context(A)) as server:
        with pytest.raises(REFUSED):
            await say(server.port, context, tls.server_name(A.peer_id))
    assert server.peers == []
    assert not server.heard


async def test_tls_1_2_is_refused_at_both_ends() -> None:
    client = tls.client_context(B)
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(tls.server_context(A)) as server:
        with pytest.raises(REFUSED):
            await say(server.port, client, tls.server_name(A.peer_id))
    assert server.peers == []
    old = tls.server_context(A)
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with serving(old) as server:
        with pytest.raises(REFUSED):
            await say(server.port, tls.client_context(B), tls.server_name(A.peer_id))
    assert server.peers == []


async def test_a_self_signed_client_is_refused() -> None:
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_chain(context, _self_signed(B), B.key)
    async with serving(tls.server_context(A)) as server:
        with pytest.raises(REFUSED):
            await say(server.port, context, tls.server_name(A.peer_id))
    assert server.peers == []


def test_a_certificate_of_another_key_cannot_be_used() -> None:
    """A's certificate is public; without A's key it cannot even be loaded, let alone proven."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        tls.load_chain(context, tls.certificate(A), M.key)


async def test_without_an_authority_no_client_certificate_is_ever_asked_for() -> None:
    """Why the well-known authority exists: the naive contexts do not authenticate at all."""
    naive_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_chain(naive_server, _self_signed(A), A.key)
    naive_client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naive_client.check_hostname = False
    naive_client.verify_mode = ssl.CERT_NONE
    naive_server.sslobject_class = naive_client.sslobject_class = ssl.SSLObject
    tls.load_chain(naive_client, _self_signed(B), B.key)
    seen: list[bytes | None] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
        writer.write(b"x")
        writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=naive_server)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=naive_client, server_hostname="a"
        )
        assert await reader.readexactly(1) == b"x"
        writer.transport.abort()
    assert seen == [None]  # CERT_NONE: the server never learns who the client is
    required = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    required.verify_mode = ssl.CERT_REQUIRED
    tls.load_chain(required, _self_signed(A), A.key)
    async with serving(required) as server:
        with pytest.raises(REFUSED):  # CERT_REQUIRED without the authority: nobody gets in
            await say(server.port, naive_client, "a")


async def test_a_certificate_of_another_kind_of_key_is_refused() -> None:
    key = generate_private_key(SECP256R1())
    leaf = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(tls.authority().subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .sign(tls._CA_KEY, None)
    )
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_chain(context, leaf, key)  # type: ignore[arg-type]
    async with serving(tls.server_context(A)) as server:
        with pytest.raises(REFUSED):
            await say(server.port, context, tls.server_name(A.peer_id))
    assert server.peers == []


def test_certificates_hold_whatever_the_clock_says() -> None:
    for certificate in (tls.certificate(A), tls.authority()):
        assert certificate.not_valid_before_utc.year == 1970
        assert certificate.not_valid_after_utc.year == 9999
    assert tls.authority() == tls.authority()


def test_server_names_carry_the_whole_key() -> None:
    name = tls.server_name(A.peer_id)
    assert len(name.partition(".")[0]) == 52
    assert tls.peer_of_name(name) == A.peer_id
    assert tls.peer_of_name(name.replace(".", ".bulk.")) == A.peer_id
    for bad in ("", "peer", "anyone.peer", "a" * 52 + "8.peer", "ä.peer"):
        with pytest.raises(Malformed):
            tls.peer_of_name(bad)
    with pytest.raises(Malformed):
        tls.server_name(PeerId("nobody"))


async def test_a_pooled_connection_serves_only_the_peer_it_was_proven_for() -> None:
    """Two ids at one address: the pooled connection to one is never used for the other."""
    limits = Limits(grace=0.1)
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=limits) as a,
        HttpTransport(B, limits=limits) as b,
    ):
        assert a.listening is not None
        address = "{}:{}".format(*a.listening)

        async def greet(peer: PeerId, body: bytes) -> bytes:
            return b"hello"

        a.on_call("greet", greet)
        b.book.add(A.peer_id, address)
        b.book.add(M.peer_id, address)
        assert await b.call(A.peer_id, "greet", b"", timeout=5) == b"hello"
        with pytest.raises(IdentityMismatch) as error:
            await b.call(M.peer_id, "greet", b"", timeout=5)
        assert (error.value.expected, error.value.got) == (M.peer_id, A.peer_id)
        assert await b.call(A.peer_id, "greet", b"", timeout=5) == b"hello"
        assert a.stats.requests_by_name["greet"] == 2


async def test_plain_and_tls_do_not_mix() -> None:
    limits = Limits(grace=0.1, handshake=1.0)
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=limits) as secure,
        HttpTransport(B, listen="127.0.0.1:0", limits=limits, tls=False) as plain,
    ):
        for dialler, target in ((secure, plain), (plain, secure)):
            assert target.listening is not None
            with pytest.raises(TransportError) as error:
                await dialler.dial("{}:{}".format(*target.listening))
            assert isinstance(error.value, Unreachable)
        assert secure.stats.requests_by_name.total() == 0
        assert plain.stats.requests_by_name.total() == 0


# --- helpers ----------------------------------------------------------------------------------


def _context(protocol: int) -> ssl.SSLContext:
    """Ours, but without a certificate yet."""
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    pem = tls.authority().public_bytes(serialization.Encoding.PEM).decode()
    context.load_verify_locations(cadata=pem)
    context.sslobject_class = tls.PeerSSLObject
    return context


def _certificate_for(identity: Identity, *, name: str, server: str) -> x509.Certificate:
    """``identity``'s key under the public authority, with somebody else's names on it."""
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(tls.authority().subject)
        .public_key(identity.key.public_key())
        .serial_number(1234)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(server)]), critical=False)
        .sign(tls._CA_KEY, None)
    )


def _self_signed(identity: Identity) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.peer_id)])
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(identity.key.public_key())
        .serial_number(1234)
        .not_valid_before(datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC))
        .not_valid_after(datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC))
        .sign(identity.key, None)
    )
