"""The manifest: one canonical form, one run id, mistakes in words."""

import json
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from bootstrap.manifest import (
    MAX_CONFIG_BYTES,
    MAX_MANIFEST_BYTES,
    Data,
    Inner,
    Manifest,
    Model,
    difference,
    load,
)
from bootstrap.manifest_gossip import PRECISE
from bootstrap.manifest_rounds import (
    COARSE,
    FINEST_FIRST,
    SPARSE,
    Codec,
    CodecChoice,
    Outer,
    Rounds,
)
from bootstrap.validation import MAX_FILE_BYTES, allowed, fields, to_toml
from diloco.outer import outer_rates
from protocols.codecs import NAMES, codec
from protocols.errors import Malformed, OperatorError

# changes only with the schema, and then so do all runs
GOLDEN = "84a5542909513edbfe543dcbbe2853f0568b67ef154cdbf8d5d70ea1230c5046"


def test_the_run_id_is_the_same_everywhere():
    assert Manifest().run_id.hex() == GOLDEN
    assert Manifest().label == f"tiny-docs-{GOLDEN[:4]}"
    assert len(Manifest().run_id) == 32


def test_canonical_bytes_are_sorted_compact_and_complete():
    manifest = Manifest(name="a", data=Data(path="ä/ö"))
    text = manifest.canonical().decode()
    assert "ä/ö" in text
    assert (
        json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        == text
    )
    assert set(json.loads(text)) == set(Manifest.model_fields)


@given(
    lr=st.floats(min_value=1e-300, max_value=10),
    decay=st.floats(min_value=0, max_value=1),
    seed=st.integers(0, 2**63 - 1),
)
def test_floats_survive_exactly(lr, decay, seed):
    manifest = Manifest(seed=seed, inner=Inner(lr=lr, weight_decay=decay))
    back = Manifest.parse(manifest.canonical())
    assert back == manifest
    assert back.run_id == manifest.run_id
    assert back.inner.lr.hex() == lr.hex()


def test_minus_zero_is_zero():
    assert (
        Manifest(inner=Inner(weight_decay=-0.0)).run_id
        == Manifest(inner=Inner(weight_decay=0.0)).run_id
    )


def test_an_integer_for_a_float_is_the_same_run():
    assert Manifest(inner=Inner(lr=1)).run_id == Manifest(inner=Inner(lr=1.0)).run_id


@given(st.binary(max_size=4096))
@example(b"[" * 40_000)
@example(b'{"a":' * 8_000)
@example(b'{"seed":' + b"9" * 6000 + b"}")
@example(b"\xff\xfe")
@example(b"NaN")
@example(b'{"rounds":{"fragments":1e999}}')
@example(b'{"mode":"sparta","inner":{"total_steps":1' + b"0" * 400 + b"}}")
def test_arbitrary_bytes_raise_malformed_only(data):
    with pytest.raises(Malformed):
        Manifest.parse(data)


def _mutations():
    good = Manifest().canonical()
    plain = json.loads(good)
    yield "space", good.replace(b":", b": ", 1)
    yield "duplicate key", good.replace(b'"seed":0}', b'"seed":0,"seed":0}')
    yield "text for a number", good.replace(b'"n_layers":2', b'"n_layers":"2"')
    yield "float form", good.replace(b'"lr":0.7', b'"lr":7e-1')
    yield "infinity", good.replace(b'"rope_theta":10000.0', b'"rope_theta":1e999')
    yield "too long", good[:-1] + b" " * MAX_MANIFEST_BYTES + b"}"
    yield (
        "left out",
        json.dumps(
            {k: v for k, v in plain.items() if k != "outer"}, sort_keys=True, separators=(",", ":")
        ).encode(),
    )
    yield (
        "unknown key",
        json.dumps(plain | {"zzz": 1}, sort_keys=True, separators=(",", ":")).encode(),
    )
    yield "unsorted", json.dumps(plain | {"a": 1}, separators=(",", ":")).encode()


@pytest.mark.parametrize(("what", "data"), list(_mutations()))
def test_only_the_canonical_form_is_taken(what, data):
    assert data != Manifest().canonical()
    with pytest.raises(Malformed):
        Manifest.parse(data)


def test_what_is_too_long_is_not_even_read():
    with pytest.raises(Malformed, match="exceeds"):
        Manifest.parse(b" " * (MAX_MANIFEST_BYTES + 1))


def test_a_missing_key_is_named():
    plain = json.loads(Manifest().canonical())
    del plain["rounds"]["codec"]
    data = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    with pytest.raises(Malformed, match=r"rounds\.codec"):
        Manifest.parse(data)


# --- signatures -------------------------------------------------------------------------------


def test_differences_name_the_fields():
    ours = Manifest(model=Model(n_layers=12), inner=Inner(betas=(0.9, 0.99)))
    theirs = Manifest(model=Model(n_layers=16))
    assert difference(ours, theirs) == [
        "model.n_layers 12 != 16",
        "inner.betas [0.9, 0.99] != [0.9, 0.95]",
    ]
    assert difference(ours, ours) == []


def test_toml_round_trip(tmp_path):
    manifest = Manifest(
        name="two", model=Model(n_layers=3), data=Data(path='a "b"\\\x7f'), inner=Inner(eps=1e-9)
    )
    path = tmp_path / "run.toml"
    path.write_text(to_toml(manifest), encoding="utf-8")
    assert load(path) == manifest


def test_toml_shows_what_is_default():
    text = to_toml(Manifest(model=Model(n_layers=3)))
    assert "n_layers = 3\n" in text
    assert "d_model = 64  # default\n" in text


def _mistake(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OperatorError) as caught:
        load(path)
    assert caught.value.code == "E204"
    assert caught.value.exit_code == 2
    return caught.value.text()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\nn_layer = 3", "model.n_layer: unknown key; did you mean model.n_layers?"),
        ("[modell]\nn_layers = 3", "modell: unknown key; did you mean model?"),
        ("n_layers = 3", "n_layers: unknown key; it stands in another table: model.n_layers"),
        ("[model]\nn_layers = 0", "model.n_layers = 0: must be 1 to 1024"),
        ("[rounds]\nquorum = 2", "rounds.quorum = 2: must be more than 0 and at most 1"),
        (
            "[rounds]\ncodec = 'int5'",
            "rounds.codec = 'int5': must be 'fp32', 'bf16', 'fp16', 'int8'",
        ),
        ("[inner]\nlr = 'fast'", "inner.lr = 'fast': must be a valid number"),
        ("[inner]\nlr = nan", "inner.lr = nan: must be"),
        ("[inner]\nbetas = [0.9, 1.0]", "inner.betas.1 = 1.0: must be less than 1"),
        ("[outer]\nmomentum = 1.0", "outer.momentum = 1.0: must be 0 or more and less than 1"),
        ("name = 'A B'", "name = 'A B': must match pattern"),
        ("[model]\nn_heads = 5", "model.d_model 64 is no multiple of n_heads 5"),
        ("[model]\nd_model = 36\nn_heads = 4", "model.d_model / n_heads must be even"),
        ("[model]\nn_kv_heads = 3", "model.n_heads 4 is no multiple of n_kv_heads 3"),
        ("[model]\nexperts = 4\ntop_k = 5", "model.top_k 5 exceeds experts 4"),
        ("[data]\nseq_len = 256", "data.seq_len 256 exceeds model.max_seq_len 128"),
        ("[rounds]\noverlap_steps = 26", "rounds.overlap_steps exceeds a quarter"),
        (
            "mode = 'eager'\n[rounds]\noverlap_steps = 51",
            "overlap_steps exceeds rounds.inner_steps",
        ),
        ("[rounds]\ninner_steps = 3\nfragments = 4\n[model]\nn_layers = 4", "each needs a turn"),
        ("[rounds]\nmost_steps = 49", "rounds.most_steps is less than rounds.inner_steps"),
        ("[rounds]\nfragments = 2\ntau = 13", "rounds.tau exceeds a quarter"),
        ("[rounds]\nfragments = 2\noverlap_steps = 2", "rounds.overlap_steps is for whole models"),
        ("model = 3", "model = 3: must be a valid dictionary"),
        ("[rounds]\nfragments = inf", "rounds.fragments = inf: must be a finite number"),
        ("mode = 'eager'\n[rounds]\ninner_steps = inf", "rounds.inner_steps = inf: must be"),
        (
            "mode = 'allreduce'\n[outer]\noptimizer = 'onebit-adam'\n"
            f"[rounds]\ntotal_rounds = 1{'0' * 400}",
            "rounds.total_rounds = 1000",
        ),
        (f"seed = 1{'0' * 5000}", "not valid TOML"),
        ("mode = 'async'\nmerge = 'median'", "merge = 'median': must be a valid dictionary"),
        ("[model", "not valid TOML"),
        (b"\xff", "not UTF-8"),
        ("#" * 70_000, "larger than"),
        ("a = " + "[" * 5000, "not valid TOML"),
    ],
)
def test_mistakes_are_explained(tmp_path, text, expected):
    assert expected in _mistake(tmp_path, text)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("\U0001f600" * 16_384, "model.config has 65536 bytes, more than 16384"),
        ("é" * 8_193, "model.config has 16386 bytes, more than 16384"),
        ("\x01" * 9_000, "bytes in its signed form, more than"),
        ("a" * 16_385, "model.config = 'aaa"),
    ],
)
def test_what_is_too_large_to_be_signed_is_refused(tmp_path, config, expected):
    made = f"[model]\nkind = 'hf'\nconfig = {json.dumps(config, ensure_ascii=len(config) == 9_000)}"
    if len(made.encode()) > MAX_FILE_BYTES:  # given by other ways than a file
        with pytest.raises(ValidationError, match=expected):
            Manifest.model_validate({"model": {"kind": "hf", "config": config}})
    else:
        assert expected in _mistake(tmp_path, made)


def test_a_large_one_of_before_is_read():
    small = Manifest.model_validate({"model": {"kind": "hf", "config": "{}"}})
    model = small.model.model_copy(update={"config": "é" * MAX_CONFIG_BYTES})
    before = small.model_copy(update={"model": model})
    assert Manifest.parse(before.canonical()).run_id == before.run_id


def test_all_mistakes_at_once(tmp_path):
    text = _mistake(tmp_path, "foo = 1\n[model]\nn_layers = 0\n[inner]\nlr = -1")
    assert "3 mistakes" in text
    assert "foo" in text
    assert "model.n_layers" in text
    assert "inner.lr" in text


def test_no_file(tmp_path):
    with pytest.raises(OperatorError, match="No such file"):
        load(tmp_path / "none.toml")


def test_every_bound_can_be_told_in_words():
    for key, field in fields(Manifest):
        words = allowed(field)
        assert not words.endswith(" "), key
        if key in ("model.n_layers", "rounds.codec", "outer.momentum", "rounds.eval_every"):
            assert words


def test_it_is_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        Manifest().seed = 3
    with pytest.raises(ValidationError):
        Rounds(inner_steps=0)


def test_a_changed_copy_is_another_run() -> None:
    manifest = Manifest()
    before = manifest.run_id
    assert manifest.model_copy(update={"seed": 1}).run_id == Manifest(seed=1).run_id != before
    assert manifest.model_copy().run_id == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[rounds]\ncodec = 'int2'\nfeedback = 0", "rounds.feedback = 0 with codec int2"),
        ("[rounds]\ncodec = 'auto'\nfeedback = 0", "rounds.feedback = 0 with codec int2"),
        ("[rounds]\ncodec = 'top3'", "codec top3 with outer.momentum"),
        ("[rounds]\ncodec = 'auto'\ncodecs = ['top12']", "codec top12 with outer.momentum"),
        ("[rounds]\ncodecs = []", "rounds.codecs must name at least one"),
        ("[rounds]\ncodecs = ['int4', 'int4']", "none twice"),
        ("[rounds]\ncodecs = ['int2', 'int4']", "from fine to coarse: int4, int2"),
        ("[rounds]\ncodecs = ['auto']", "must be"),
        ("[rounds]\nexposed = 0", "rounds.exposed = 0: must be more than 0"),
        (
            "[rounds]\ncodec = 'top12'\n[outer]\nmomentum = 0",
            "codec top12 with outer.momentum",  # the start value is there still
        ),
        ("[rounds]\nfeedback = 1.5", "rounds.feedback = 1.5: must be 0 to 1"),
    ],
)
def test_codecs_that_would_lead_astray_are_refused(tmp_path, text, expected):
    assert expected in _mistake(tmp_path, text)


def test_which_runs_keep_what_codecs_lose() -> None:
    assert not Rounds(feedback=0).feeds_back
    assert Rounds(codec="int1").feeds_back
    assert Rounds(codec="auto").feeds_back
    assert not Rounds(codec="auto", codecs=("bf16", "int4")).feeds_back
    assert Rounds().allowed_codecs == ("int4",)
    assert Rounds(codec="auto").allowed_codecs == ("int4", "int2")
    sparse = Manifest(
        rounds=Rounds(codec="top3"), outer=Outer(lr=1.0, momentum=0, momentum_start=0)
    )
    assert Manifest.parse(sparse.canonical()) == sparse


def test_rates_of_a_round_follow_from_what_the_schedule_takes_and_nothing_else() -> None:
    """A setting that somebody adds is no word that the schedule does not know."""

    class More(Outer):
        damping: float = 0.1

    assert More().schedule == Outer().schedule
    assert outer_rates(10**6, **More().schedule) == (Outer().lr, Outer().momentum)


def test_the_manifest_knows_the_codecs_as_they_are() -> None:
    assert set(get_args(Codec)) == set(NAMES)
    assert get_args(CodecChoice) == (*get_args(Codec), "auto")
    bits = [codec(name).bits for name in FINEST_FIRST]
    assert bits == sorted(bits, reverse=True)
    assert {name for name in NAMES if codec(name).feedback} == set(COARSE)
    assert {name for name in NAMES if codec(name).sparse} == set(SPARSE)
    assert {name for name in NAMES if codec(name).bits >= codec("int8").bits} == set(PRECISE)


def test_a_script_s_model_has_no_fragments():
    script = {"layout": "0" * 64, "parameters": 10, "dense": 8}
    assert Manifest.model_validate({"script": script}).rounds.fragments == 1
    with pytest.raises(ValidationError, match="merged as a whole"):
        Manifest.model_validate({"script": script, "rounds": {"fragments": 2}})
    with pytest.raises(ValidationError, match="describe no model"):
        Manifest.model_validate({"script": {"layout": "0" * 64}})
    with pytest.raises(ValidationError, match="describe no model"):
        Manifest.model_validate({"script": script | {"dense": 11}})
