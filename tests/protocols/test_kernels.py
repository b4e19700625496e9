"""The compiled loops give the bits that torch gives, refuse what it refuses, and can be missing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path

import codec_kit
import numpy as np
import pytest
import torch
from codec_kit import encoded
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from protocols.codecs import CHUNK, NAMES, codec, kernels
from protocols.errors import NonFinite

COMPILED = tuple(name for name in NAMES if kernels.kernel(name) is not None)
BLOCKS = tuple(name for name in COMPILED if name not in kernels.FLOATS)
IN_C = re.compile(r"^int atoll_(\w+)_(encode|decode|refused)\(", re.MULTILINE)
LENGTHS = (1, 63, 64, 65, 127, 129, 255, 257, 4096, 5000, CHUNK - 1)

pytestmark = pytest.mark.skipif(kernels.kernel("int4") is None, reason="there is no C compiler")


def plain(work: Callable[[], tuple[object, bytes]]) -> tuple[object, bytes]:
    """What torch makes of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(kernels.SWITCH, "off")
        assert kernels.kernel("int4") is None
        return work()


def outcome(work: Callable[[], Tensor]) -> tuple[object, bytes]:
    """How it ended, and the bytes that came of it."""
    try:
        return None, work().view(torch.uint8).numpy().tobytes()
    except (ValueError, NonFinite) as error:
        return type(error), b""


def same(work: Callable[[], Tensor]) -> tuple[object, bytes]:
    compiled = outcome(work)
    assert compiled == plain(lambda: outcome(work))
    return compiled


def decode(name: str, data: Tensor, count: int) -> Tensor:
    out = torch.zeros(count)
    codec_kit.decode(name, data, out)
    return out


def added(name: str, data: Tensor, weight: float, to: Tensor) -> Tensor:
    total = to.clone()
    codec_kit.decode_add(name, data, weight, total)
    return total


def any_bits(seed: int, count: int) -> Tensor:
    """Floats of all magnitudes, zeros and subnormal ones among them, but all finite."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, count, dtype=np.uint32)
    values = torch.from_numpy(bits.view(np.float32).copy())
    scale = 2.0 ** float(random.integers(-140, 100))
    near = torch.from_numpy(random.standard_normal(count).astype(np.float32)) * scale
    wild = random.random() < 0.3
    chosen = values.nan_to_num(0.0, 0.0, 0.0).clamp(-1e38, 1e38) if wild else near
    chosen[torch.from_numpy(random.random(count) < random.choice([0.0, 0.1, 0.99]))] = 0.0
    return chosen


def times(name: str, data: Tensor, weight: float, count: int) -> Tensor:
    out = torch.zeros(count)
    codec(name).decode_one(data, out, weight)
    return out


def test_every_codec_with_a_function_in_c_has_all_that_are_called() -> None:
    """One whose name is written wrong would be done by torch, three times slower."""
    written: dict[str, set[str]] = {}
    for path in kernels.SOURCES:
        for name, what in IN_C.findall(path.read_text()):
            written.setdefault(name, set()).add(what)
    assert written.keys() >= {"fp32", "bf16", "fp16", "int8", "int4", "int2", "int1"}
    for name, functions in written.items():
        assert name in NAMES
        assert functions >= {"encode", "decode"}, name
        assert (name in kernels.FLOATS) == ("refused" in functions), name
        # fp16's are compiled where the processor converts it
        assert kernels.kernel(name) is not None or name == "fp16", name


@pytest.mark.parametrize("name", COMPILED)
@given(seed=st.integers(0, 2**32), count=st.sampled_from(LENGTHS), weight=st.floats(0, 1))
@example(seed=0, count=CHUNK, weight=0.25)
@settings(max_examples=60, deadline=None)
def test_compiled_and_plain_give_the_same_bits(
    name: str, seed: int, count: int, weight: float
) -> None:
    values = any_bits(seed, count)
    error, data = same(lambda: encoded(name, values))
    if error is None:
        found = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        same(lambda: decode(name, found, count))
        same(lambda: added(name, found, weight, torch.linspace(-1.0, 1.0, count)))
        same(lambda: times(name, found, weight, count))


@pytest.mark.parametrize("name", COMPILED)
@given(seed=st.integers(0, 2**32), count=st.sampled_from(LENGTHS))
@settings(max_examples=60, deadline=None)
def test_bytes_of_a_stranger_decode_to_the_same_or_are_refused_by_both(
    name: str, seed: int, count: int
) -> None:
    random = np.random.default_rng(seed)
    noise = random.integers(0, 256, codec(name).encoded_size(count), dtype=np.uint8)
    if seed % 2:
        noise &= 0xBF  # no exponent is large: most of these decode
    if name in kernels.FLOATS and seed % 4 == 1:
        noise[codec(name).encoded_size(1) - 1 :: codec(name).encoded_size(1)] &= 0x3F
    data = torch.from_numpy(noise)
    same(lambda: decode(name, data, count))
    same(lambda: added(name, data, 0.5, torch.zeros(count)))
    error, _ = same(lambda: unharmed(name, data, count))
    if name in kernels.FLOATS and seed % 4 == 1:
        assert error is None


def unharmed(name: str, data: Tensor, count: int) -> Tensor:
    codec(name).check_one(data, count)
    return data


@pytest.mark.parametrize("name", [one for one in COMPILED if one in kernels.FLOATS])
@pytest.mark.parametrize("count", [1, 7, 8, 15, 16, 17, 511, 513])
def test_floats_that_lie_anywhere_are_decoded(name: str, count: int) -> None:
    values = normal(count)
    data = encoded(name, values)
    room = torch.zeros(len(data) + 1, dtype=torch.uint8)
    room[1:] = data
    assert torch.equal(decode(name, room[1:], count), decode(name, data, count))
    assert torch.equal(added(name, room[1:], 0.5, values), values + 0.5 * decode(name, data, count))


@pytest.mark.parametrize(
    ("name", "last", "first"),
    [
        ("fp16", 65519.99, 65520.0),  # the largest that is rounded down, what becomes infinite
        ("bf16", float.fromhex("0x1.fefffep127"), float.fromhex("0x1.ffp127")),
        ("fp32", 3.4028235e38, float("inf")),
    ],
)
def test_what_rounding_makes_infinite_is_refused(name: str, last: float, first: float) -> None:
    for sign in (1, -1):
        assert same(lambda sign=sign: encoded(name, torch.tensor([0.0, sign * last])))[0] is None
        error, _ = same(lambda sign=sign: encoded(name, torch.tensor([sign * first, 0.0])))
        assert error is ValueError


def normal(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
@pytest.mark.parametrize("where", [0, 64, 999])
def test_what_cannot_be_encoded_is_refused_by_both(name: str, bad: float, where: int) -> None:
    values = torch.ones(1000)
    values[where] = bad
    error, _ = same(lambda: encoded(name, values))
    assert error is ValueError


@pytest.mark.parametrize("name", COMPILED)
def test_a_refused_chunk_adds_nothing(name: str) -> None:
    data = encoded(name, torch.ones(1000))
    if name in kernels.FLOATS:
        data[-1] = data[-2] = 0xFF  # the last value is none
    else:
        data[:2] = torch.tensor([0x80, 0x7F], dtype=torch.uint8)  # a scale that is infinite
    total = torch.ones(1000)
    with pytest.raises(NonFinite):
        codec_kit.decode_add(name, data, 1.0, total)
    assert torch.equal(total, torch.ones(1000))


def fresh(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As in a process that has loaded nothing yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(kernels, "_library", kernels._library.__wrapped__)


def test_the_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh(monkeypatch, tmp_path)
    assert kernels.kernel("int8") is not None
    (made,) = (tmp_path / "atoll" / "kernels").iterdir()
    monkeypatch.setattr(kernels, "_compile", pytest.fail)
    assert kernels.kernel("int8") is not None
    assert made.exists()


def test_a_library_that_does_not_load_is_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh(monkeypatch, tmp_path / "good")
    assert kernels.kernel("int8") is not None
    (made,) = (tmp_path / "good" / "atoll" / "kernels").iterdir()
    spoilt = tmp_path / "bad" / "atoll" / "kernels" / made.name
    spoilt.parent.mkdir(parents=True)
    spoilt.write_bytes(made.read_bytes()[:100])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "bad"))
    assert kernels.kernel("int8") is not None
    assert spoilt.stat().st_size > 100


def test_without_a_home_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    fresh(monkeypatch, tmp_path)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        assert kernels.kernel("int8") is None
    assert "home directory" in caplog.text


def test_without_a_compiler_torch_does_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fresh(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, logger=kernels.__name__):
        assert kernels.kernel("int8") is None
    assert "torch alone" in caplog.text
    values = torch.linspace(-1.0, 1.0, 1000)
    assert torch.allclose(decode("int8", encoded("int8", values), 1000), values, atol=0.01)


def test_a_compiler_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh(monkeypatch, tmp_path / "cache")
    failing = tmp_path / "cc"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert kernels.kernel("int8") is None


def test_a_folder_that_others_can_write_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh(monkeypatch, tmp_path)
    (tmp_path / "atoll" / "kernels").mkdir(parents=True)
    (tmp_path / "atoll" / "kernels").chmod(0o777)
    assert kernels.kernel("int8") is None
