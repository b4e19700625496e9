"""Compiled inner loops of codecs and sketches, where there is a C compiler; else torch does it all.

The files ``kernels_*.c`` are compiled when the first codec is used, once a machine: the library is
kept in ``$XDG_CACHE_HOME/atoll``, by default ``~/.cache/atoll``, under a name that follows from the
sources, the compiler and the processor. Both ways give the same bytes, so members may differ in
it. A call gives up the interpreter's lock while it runs. ``ATOLL_KERNELS=off`` turns them off.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from torch import Tensor

from protocols.files import user_home

logger = logging.getLogger(__name__)

_HERE = Path(__file__).parent
HEADER = _HERE / "kernels.h"
SOURCES = tuple(_HERE / f"kernels_{name}.c" for name in ("blocks", "floats", "lowbit", "sketch"))
SWITCH = "ATOLL_KERNELS"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILE_S = 60.0  # at most

FLOATS = ("fp32", "bf16", "fp16")

_int, _size, _pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
_ENCODE = (_pointer, _size, _pointer)
_REFUSED = (_pointer, _size)
_SKETCH = (_pointer, _pointer, _size, _size, _pointer)
_DECODE = (_pointer, _size, ctypes.c_double, ctypes.c_float, _pointer, _int)


class Kernel:
    """One codec's loops. All say False for what must be refused; nothing is decoded then.

    Raises AttributeError where the library has none for the codec.
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self._encode = getattr(library, f"atoll_{name}_encode")
        self._decode = getattr(library, f"atoll_{name}_decode")
        self._encode.argtypes, self._encode.restype = _ENCODE, _int
        self._decode.argtypes, self._decode.restype = _DECODE, _int
        if name in FLOATS:
            self._refused = getattr(library, f"atoll_{name}_refused")
            self._refused.argtypes, self._refused.restype = _REFUSED, _int

    def encode(self, values: Tensor, out: Tensor) -> bool:
        """Values fp32 [n] to bytes [size of n], both contiguous; on False ``out`` is undefined."""
        refused: int = self._encode(values.data_ptr(), values.numel(), out.data_ptr())
        return not refused

    def decode(
        self, data: Tensor, out: Tensor, weight: float, limit: float, *, add: bool = False
    ) -> bool:
        """Bytes [size of n] times ``weight`` to, or added to, fp32 [n]; scales up to ``limit``.

        Floats have no scales, and no limit.
        """
        refused: int = self._decode(
            data.data_ptr(), out.numel(), limit, weight, out.data_ptr(), add
        )
        return not refused

    def finite(self, data: Tensor, count: int) -> bool:
        """Whether bytes of one of :data:`FLOATS` stand for ``count`` finite values."""
        refused: int = self._refused(data.data_ptr(), count)
        return not refused


def load() -> None:
    """Have the loops at hand, compiled where no codec was ever used: that takes seconds.

    For callers that use codecs on a thread that must not wait.
    """
    _wanted()


def kernel(name: str) -> Kernel | None:
    """A codec's loops, if it has any and they are compiled or can be."""
    library = _wanted()
    return _kernel(library, name) if library is not None else None


def add_signed(values: Tensor, signs: Tensor, totals: Tensor) -> bool:
    """One pass of a :mod:`gossip.membership.sketch`; False if it is not compiled and cannot be.

    ``values`` fp32 [32, words] are added up in ``totals`` fp64 [buckets], value [b, j] in bucket
    j modulo ``buckets``, with the sign that bit 31 - b of ``signs`` int32 [words] is. All
    contiguous; ``words`` is a multiple of ``buckets`` and at most 8192.
    """
    library = _wanted()
    if library is None:
        return False
    call = library.atoll_sketch
    call.argtypes, call.restype = _SKETCH, _int
    refused: int = call(
        values.data_ptr(), signs.data_ptr(), signs.numel(), totals.numel(), totals.data_ptr()
    )
    return not refused


def _wanted() -> ctypes.CDLL | None:
    return _library() if os.environ.get(SWITCH, "").lower() not in ("0", "off") else None


@functools.cache
def _kernel(library: ctypes.CDLL, name: str) -> Kernel | None:
    try:
        return Kernel(library, name)
    except AttributeError:
        # Codecs without loops in C, and fp16 where the processor does not convert it. With a name
        # that is written wrong in C torch would do it all, and say nothing: a test looks.
        return None


@functools.cache
def _library() -> ctypes.CDLL | None:
    try:
        return _loaded()
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("codecs run in torch alone, about three times slower: %s", error)
        return None


def _loaded() -> ctypes.CDLL:
    if sys.byteorder != "little":
        raise OSError("this machine is not little-endian")
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise OSError(f"there is none of the compilers {', '.join(COMPILERS)}")
    folder = _folder()
    target = folder / f"kernels-{_fingerprint(compiler)}.so"
    with contextlib.suppress(OSError):  # there is none, or a disk has spoilt it
        return ctypes.CDLL(str(target))
    _compile(compiler, target)
    return ctypes.CDLL(str(target))


def _folder() -> Path:
    """Where the library is kept: nobody else may write there, since what lies there is run."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = user_home() / ".cache"
    folder = cache / "atoll" / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"others can write to {folder}")
    return folder


def _fingerprint(compiler: str) -> str:
    """Changes with whatever the library depends on."""
    about = Path(compiler).resolve().stat()
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        processor += "".join(sorted({line for line in lines if line[:5] in ("flags", "Featu")}))
    sources = [path.read_bytes() for path in (HEADER, *SOURCES)]
    facts = (sources, FLAGS, compiler, about.st_size, about.st_mtime_ns, processor)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24]


def _compile(compiler: str, target: Path) -> None:
    """Raises OSError or SubprocessError. Several processes may do it at once: the last one wins."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [compiler, *FLAGS, "-shared", "-fPIC", "-o", str(made), *map(str, SOURCES), "-lm"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[-300:]}")
        made.replace(target)
