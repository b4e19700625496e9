"""A manifest that its creator has signed: who can read it, and what is noticed."""

from dataclasses import replace

import pytest

from bootstrap.manifest import MAX_CONFIG_BYTES, Manifest
from bootstrap.signed_manifest import NEVER, PURPOSE, SignedManifest
from protocols import envelope
from protocols.errors import BadSignature, Malformed, RemoteProtocolError, Stale
from protocols.messages import ManifestRequest, ManifestText


def test_a_joiner_gets_the_manifest_and_its_creator(identities):
    [creator] = identities(1)
    signed = SignedManifest.create(Manifest(), creator)
    opened = SignedManifest.open(signed.data, signed.run_id)
    assert opened == signed
    assert opened.creator == creator.peer_id
    assert ManifestRequest(opened.run_id).encode()


def test_every_flipped_byte_is_noticed(identities):
    [creator] = identities(1)
    signed = SignedManifest.create(Manifest(), creator)
    for position in range(0, len(signed.data), 7):
        data = bytearray(signed.data)
        data[position] ^= 1
        with pytest.raises(RemoteProtocolError):
            SignedManifest.open(bytes(data), signed.run_id)


def test_another_run_is_refused(identities):
    [creator] = identities(1)
    signed = SignedManifest.create(Manifest(), creator)
    with pytest.raises(Stale):
        SignedManifest.open(signed.data, Manifest(seed=1).run_id)


def test_a_swapped_body_under_the_right_name_is_refused(identities):
    [creator] = identities(1)
    wanted, other = Manifest(), Manifest(seed=1)
    data = envelope.seal(
        creator,
        ManifestText(other.canonical()),
        purpose=PURPOSE,
        expires=NEVER,
        sequence=0,
        run=wanted.run_id,
    )
    with pytest.raises(BadSignature, match="hash"):
        SignedManifest.open(data, wanted.run_id)


def test_a_signature_of_somebody_else_is_refused(identities):
    creator, other = identities(2)
    signed = SignedManifest.create(Manifest(), creator)
    forged = replace(envelope.Envelope.decode(signed.data), signer=other.peer_id).encode()
    with pytest.raises(BadSignature):
        SignedManifest.open(forged, signed.run_id)


def test_a_signed_manifest_that_breaks_the_schema_is_refused(identities):
    from blake3 import blake3

    [creator] = identities(1)
    body = Manifest().canonical().replace(b'"n_layers":2', b'"n_layers":0')
    run = blake3(body).digest()
    data = envelope.seal(
        creator, ManifestText(body), purpose=PURPOSE, expires=NEVER, sequence=0, run=run
    )
    with pytest.raises(Malformed, match=r"model\.n_layers = 0: must be 1 to 1024"):
        SignedManifest.open(data, run)


# --- for people -------------------------------------------------------------------------------


def test_the_largest_can_be_signed_and_opened(identities):
    [creator] = identities(1)
    texts = {"config": '"' * MAX_CONFIG_BYTES, "initial": "a" * 64}
    made = Manifest.model_validate(
        {
            "name": "x" * 41,
            "model": {"kind": "hf"} | texts,
            "data": {"path": "\U0001f600" * 1024, "tokenizer": "a" * 64},
        }
    )
    signed = SignedManifest.create(made, creator)
    assert SignedManifest.open(signed.data, made.run_id).manifest == made
