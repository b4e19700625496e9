"""What all nodes of a swarm have to compute alike, to the bit: one value of each formula.

The digest of :mod:`tests.protocols.test_protocol_version` knows the fields of messages, and nothing
of what stands in them. Whoever changes a formula on purpose raises PROTOCOL_VERSION with it, since
a swarm of both builds would fall apart without a word; then the values here follow.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from blake3 import blake3
from gossip_kit import EVERYBODY, RUN, decided, roster_of

from diloco import federated, sparta
from diloco.optimizers import RULES, Rates, named
from gossip.membership.pulse import Beat, HashChain, tag_of
from gossip.membership.sketch import sketch
from gossip.plans.certificate import basis_of, genesis, leader_order, outcome_hash
from gossip.plans.mix import Mix
from node.replicas import mixing
from node.replicas.arrivals import arrived, together
from node.trainer.sampler import Sampler
from protocols.codecs import NAMES, RangeCodec
from protocols.counts import pack_counts
from protocols.messages import Outcome, PartResult

ENCODED = {
    "fp32": "ef54fccea7069528",
    "bf16": "ac5d568eee5a53a5",
    "fp16": "5ec0a13d8e6d0199",
    "int8": "2e5ce45094f2d15f",
    "int4": "7eb77b00c23bf2c3",
    "int2": "66939c1ba664ed77",
    "int1": "39f90a0bbd45a303",
    "top12": "e215310debb5a5eb",
    "top3": "94822be7500212a7",
}
STEPPED = {
    "sgd": "d1b2077972ae0da2",
    "nesterov": "a926148fac901bee",
    "heavyball": "5eab0a006c568588",
    "adam": "83489c82bd562984",
    "yogi": "9a0e2c8e26764c4d",
    "sparseloco": "d1b2077972ae0da2",
    "adamw": "889365d293797462",
    "onebit-adam": "e35c32a2e22f70dc",
    "powersgd": "889365d293797462",
    "delayed-nesterov": "cfadf9d7cf157089",
}
MIXES = {**mixing.RULES, **mixing.BY_TRUST}
MERGED = {
    "mean": "af1349b9f5f9a1a6",
    "clip": "07de341e50d3aea0",
    "median": "d8117cd0d78f45ed",
    "trimmed": "5b48ce2715869a07",
    "geometric-median": "2cc1cc969b21827e",
    "centered-clip": "39d501ac68d3409a",
    "friendly": "07de341e50d3aea0",
    "open": "b2c7fa6f573e7ca3",
}
COMPUTED: dict[str, Any] = {
    "genesis": "f222e9c7c23fa748",
    "certificate": "eb139034267a6ef6",
    "outcome": "1d6d44efba9b4f1a",
    "basis": "581600170a52ffee",
    "leaders": [4, 2, 1, 3, 0],
    "beat": "713185611e719c67",
    "sketch": "2f6e4e7a74261b39",
    "windows": [[664522, 670090, 651786, 663178], [613548, 621932, 633196, 624428]],
    "sparta": [84, 47, 10, 73, 36, 99, 62, 25],
    "arrived": ["0x1.e79e79e79e79ep-2", "0x1.2147ae147ae14p+1"],
    "sampled": ["6", "7", "10", "18", "19"],
}


def numbers(of: str, count: int) -> torch.Tensor:
    """Float32 [count] between -1 and 1, small ones among them; the same on every machine."""
    words = torch.frombuffer(bytearray(blake3(of.encode()).digest(4 * count)), dtype=torch.int32)
    scale = torch.tensor([2.0 ** -(n % 7) for n in range(count)])
    return (words >> 8).to(torch.float32) / 2**23 * scale


def digest(data: Any) -> str:
    """Of bytes, or of a tensor's."""
    if isinstance(data, torch.Tensor):
        data = data.contiguous().view(torch.uint8).numpy().tobytes()
    return blake3(data).hexdigest(8)


def encoded(name: str) -> str:
    one = RangeCodec(name, 5000)
    out = bytearray(one.encoded_size(0, 5000))
    one.encode(0, numbers("codec", 5000), out)
    return digest(bytes(out))


def stepped(name: str) -> str:
    """Five rounds, all with a decay, and two of them of a warm-up, where a rule has these."""
    rule, params = named(name), numbers("params", 200).clone()
    state = rule.init(params)
    for number in range(5):
        rates = Rates(0.5, 0.75, number + 1, share=0.4, weight=3.0, decay=0.1, warmup=2)
        merged = numbers(f"merged {number}", 200).clone()
        if rule.brings is not None:
            rule.brings(state.vectors, merged, rates)
        rule.take(state.vectors, merged, params, rates)
    return digest(torch.cat([params, *state.vectors.values()]))


def merged(mix: Mix) -> str:
    """What a rule makes of five contributions: two of a kind, one long, one against the others."""
    vectors = torch.stack([numbers(f"merged {n}", 300) for n in range(5)])
    vectors[1] = vectors[0] * 1.01
    vectors[3] *= 50.0
    vectors[4] = -3.0 * vectors[:3].mean(0)
    weights = [1.0, 2.0, 1.5, 1.0, 1.0]
    found: list[float] = []
    if mix.clip is not None:
        found += mix.clip([float(vector.double().norm()) for vector in vectors])
    if mix.weigh is not None:
        wide = vectors.double()
        found += mix.weigh(wide @ wide.T, weights)
    column = b""
    if mix.column is not None:
        column = mix.column(vectors, weights).numpy().tobytes()
    return digest(struct.pack(f"<{len(found)}d", *found) + column)


def part() -> PartResult:
    """Some of one contributor, all of another."""
    counts = pack_counts([700, 300])
    return replace(decided(EVERYBODY[:3]).outcome.parts[0], start=0, stop=700, counts=counts)


def partly() -> Outcome:
    """A round with such a part."""
    outcome = decided(EVERYBODY[:3]).outcome
    weights = (0.1, 7.3)
    who = zip(outcome.contributors, weights, strict=False)
    return replace(outcome, contributors=tuple(replace(c, weight=weight) for c, weight in who))


def computed() -> dict[str, Any]:
    certificate = decided(EVERYBODY[:3])
    chain = HashChain(EVERYBODY[0].peer_id, b"secret")
    beat = Beat(tag_of(b"announcement"), 1, chain.next())
    roster = roster_of(EVERYBODY)
    sampler = Sampler(10**6, 64, 4, seed=7, reserved=400, pool=500)
    return {
        "genesis": digest(genesis(RUN)),
        "certificate": digest(certificate.encode()),
        "outcome": digest(outcome_hash(certificate.outcome)),
        "basis": digest(basis_of("int4", certificate.outcome.contributors)),
        "leaders": [roster.index(peer) for peer in leader_order(RUN, 1, 7, roster)],
        "beat": digest(chain.pulse + beat.packed()),
        "sketch": digest(sketch(numbers("sketch", 3000), RUN, start=5)),
        "windows": [sampler.starts(3, 1, 2, n).tolist() for n in (5, 70)],
        "sparta": sparta.coordinates(100, 0.08, step=17, seed=7).tolist(),
        "arrived": [value.hex() for value in together([arrived(partly(), part(), 3)])],
        "sampled": federated.sampled([str(n) for n in range(20)], 0.25, round_=3, seed=7),
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_makes_the_bytes_that_others_decode(name: str) -> None:
    assert encoded(name) == ENCODED[name]


@pytest.mark.parametrize("name", RULES)
def test_an_outer_optimizer_comes_to_the_bits_that_others_come_to(name: str) -> None:
    assert stepped(name) == STEPPED[name]


@pytest.mark.parametrize("name", MIXES)
def test_a_merge_rule_weighs_contributions_as_others_do(name: str) -> None:
    assert merged(MIXES[name]()) == MERGED[name]


def test_what_is_hashed_drawn_and_ordered_is_what_others_have() -> None:
    assert computed() == COMPUTED
