"""What the machine's GPUs do, as NVIDIA's management library (NVML) tells it; nothing without it.

The library comes with the driver, so nothing has to be installed. It is asked on a thread that ends
with its answer: a driver that hangs then costs figures, and the event loop nothing.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from node.monitor.views import GpuView

LIBRARY = "libnvidia-ml.so.1"
MAX_GPUS = 16
KEPT_S = 5.0  # figures are read anew no more often than this
_NAME_BYTES = 96  # NVML_DEVICE_NAME_V2_BUFFER_SIZE
_ON_CHIP = 0  # NVML_TEMPERATURE_GPU


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))  # percent


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class Gpus:
    """The newest figures; each call has them read anew in the background, once they are old."""

    def __init__(
        self, library: str = LIBRARY, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._library, self._clock = library, clock
        self._views: tuple[GpuView, ...] = ()
        self._nvml: ctypes.CDLL | None = None
        self._reading: threading.Thread | None = None
        self._read_at = float("-inf")
        self._there = True  # the library, as far as is known

    def __call__(self) -> tuple[GpuView, ...]:
        """As they were when they were last read; empty before, and where there are none."""
        views = self._views
        due = self._clock() - self._read_at >= KEPT_S
        if self._there and due and (self._reading is None or not self._reading.is_alive()):
            self._read_at = self._clock()
            self._reading = threading.Thread(target=self._read, name="atoll-gpus", daemon=True)
            self._reading.start()
        return views

    def wait(self, timeout: float) -> tuple[GpuView, ...]:
        """As a call, but what is being read is waited for."""
        self()
        if self._reading is not None:
            self._reading.join(timeout)
        return self._views

    def _read(self) -> None:
        try:
            if self._nvml is None:
                self._nvml = _opened(self._library)
            self._views = _all(self._nvml)
        except (OSError, AttributeError):  # no driver, or one that lacks what is asked for
            self._there = False


def _opened(library: str) -> ctypes.CDLL:
    nvml = ctypes.CDLL(library)
    if nvml.nvmlInit_v2() != 0:
        raise OSError("NVML does not start")
    return nvml


def _all(nvml: ctypes.CDLL) -> tuple[GpuView, ...]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return ()
    return tuple(_one(nvml, index) for index in range(min(count.value, MAX_GPUS)))


def _one(nvml: ctypes.CDLL, index: int) -> GpuView:
    device = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) != 0:
        return GpuView(index=index)  # it has fallen off the bus, say

    def asked(function: Any, into: Any, *more: Any) -> Any:
        """What the function wrote, or None where this GPU does not tell."""
        return into if function(device, *more, ctypes.byref(into)) == 0 else None

    name = ctypes.create_string_buffer(_NAME_BYTES)
    named = nvml.nvmlDeviceGetName(device, name, ctypes.c_uint(_NAME_BYTES)) == 0
    use = asked(nvml.nvmlDeviceGetUtilizationRates, _Utilization())
    memory = asked(nvml.nvmlDeviceGetMemoryInfo, _Memory())
    heat = asked(nvml.nvmlDeviceGetTemperature, ctypes.c_uint(), ctypes.c_int(_ON_CHIP))
    power = asked(nvml.nvmlDeviceGetPowerUsage, ctypes.c_uint())
    return GpuView(
        index=index,
        name=name.value.decode(errors="replace") if named else "",
        utilisation=None if use is None else use.gpu / 100,
        memory_used=None if memory is None else memory.used,
        memory_total=None if memory is None else memory.total,
        temperature_c=None if heat is None else float(heat.value),
        power_w=None if power is None else power.value / 1000,  # milliwatts
    )
