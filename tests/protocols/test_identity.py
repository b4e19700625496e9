"""Keys, peer ids, key files, and the signature check."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import BadSignature, Malformed, OperatorError
from protocols.identity import Identity, PeerId, peer_id_of, public_key, verify


def test_an_id_is_the_libp2p_form_of_the_key() -> None:
    identity = Identity.from_seed(bytes(32))
    # known from RFC 8032's key of the all-zero seed, with libp2p's identity multihash before it
    raw = bytes.fromhex("3b6a27bcceb6a42d62a3a8d02a6f0d73653215771de243a63ac048a18b59da29")
    assert base58.b58decode(identity.peer_id) == bytes.fromhex("002408011220") + raw
    assert identity.peer_id.startswith("12D3KooW")


def test_the_key_comes_back_out_of_the_id() -> None:
    identity = Identity.generate()
    assert peer_id_of(public_key(identity.peer_id)) == identity.peer_id


@given(st.text(max_size=80))
def test_no_text_breaks_the_parser(text: str) -> None:
    try:
        key = public_key(PeerId(text))
    except Malformed:
        return
    assert peer_id_of(key) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "0OIl" * 13,
        "1" * 65,
        base58.b58encode(bytes.fromhex("002408011221") + bytes(32)).decode(),
        base58.b58encode(bytes.fromhex("002408011220") + bytes(31)).decode(),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        Identity.from_seed(bytes(32)).peer_id + "\n",
    ],
)
def test_other_things_are_not_ids(text: str) -> None:
    with pytest.raises(Malformed):
        public_key(PeerId(text))


def test_a_signature_holds_for_one_key_and_one_text() -> None:
    a, b = Identity.generate(), Identity.generate()
    signature = a.sign(b"text")
    verify(a.peer_id, signature, b"text")
    for peer, data, mark in [
        (b.peer_id, b"text", signature),
        (a.peer_id, b"test", signature),
        (a.peer_id, b"text", bytes(64)),
        (a.peer_id, b"text", b""),
        (PeerId("nobody"), b"text", signature),
    ]:
        with pytest.raises(BadSignature):
            verify(peer, mark, data)


def test_the_key_file_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.pem"
    first = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load_or_create(path).peer_id == first.peer_id
    with pytest.raises(FileExistsError):
        Identity.generate().save(path)
    assert Identity.load(path).peer_id == first.peer_id


@pytest.mark.parametrize("content", [b"", b"not a key", b"\xff\x00" * 100])
def test_a_file_that_is_no_key_is_explained(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(OperatorError) as error:
        Identity.load(path)
    assert (error.value.code, error.value.exit_code) == ("E104", 2)
    assert str(path) in error.value.text()


def test_a_missing_an_exposed_and_a_foreign_key_are_explained(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="No such file") as missing:
        Identity.load(tmp_path / "none")
    assert "Errno" not in missing.value.why
    path = tmp_path / "identity.pem"
    Identity.generate().save(path)
    path.chmod(0o644)
    with pytest.raises(OperatorError, match="other users") as exposed:
        Identity.load(path)
    assert exposed.value.fix == f"chmod 600 {path}"
    other = generate_private_key(SECP256R1()).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    foreign = tmp_path / "foreign.pem"
    foreign.write_bytes(other)
    foreign.chmod(0o600)
    with pytest.raises(OperatorError, match="not an ed25519 key"):
        Identity.load(foreign)


def test_an_encrypted_key_is_explained(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    path.write_bytes(
        Identity.generate().key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    os.chmod(path, 0o600)
    with pytest.raises(OperatorError, match="unencrypted"):
        Identity.load(path)


def test_a_key_that_a_full_disk_cut_short_is_not_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "identity.pem"

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            Identity.load_or_create(path)
    made = Identity.load_or_create(path)
    assert Identity.load_or_create(path).peer_id == made.peer_id
    assert path.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", ["k" * 300, "file/key.pem"])
def test_a_path_where_no_file_can_be_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match="cannot use the identity file") as refused:
        Identity.load_or_create(tmp_path / place)
    assert refused.value.code == "E104"
