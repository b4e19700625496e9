"""GPU figures, from a library that has NVML's functions and structures and no GPU behind it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from node.monitor.gpus import KEPT_S, Gpus
from node.monitor.machine import Machine
from node.monitor.views import GpuView

# signatures as in nvml.h of CUDA 12; the second GPU tells its name and nothing else
NVML = r"""
#include <string.h>
typedef void *device;
static int asked;
int nvmlInit_v2(void) { return STARTS; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, device *found) {
  *found = (device)(0x7f0000000001ULL + index); return 0; }
static int first(device d) { return d == (device)0x7f0000000001ULL ? 0 : 3; }
int nvmlDeviceGetName(device d, char *name, unsigned length) {
  strncpy(name, first(d) ? "Idle" : "NVIDIA H100", length); return 0; }
int nvmlDeviceGetUtilizationRates(device d, struct { unsigned gpu, memory; } *use) {
  use->gpu = 87; use->memory = 31; return first(d); }
int nvmlDeviceGetMemoryInfo(device d, struct { unsigned long long total, free, used; } *m) {
  m->total = 80ULL << 30; m->free = 60ULL << 30; m->used = 20ULL << 30; return first(d); }
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *celsius) {
  *celsius = 61 + sensor + asked++; return first(d); }
int nvmlDeviceGetPowerUsage(device d, unsigned *milliwatts) {
  *milliwatts = 350500; return first(d); }
"""

compiler = shutil.which("cc")
needs_compiler = pytest.mark.skipif(compiler is None, reason="needs a C compiler")


def library(folder: Path, *, starts: int = 0, source: str = NVML) -> str:
    written, made = folder / "nvml.c", folder / f"libnvml{starts}.so"
    written.write_text(source)
    flags = ["-w", "-shared", "-fPIC", f"-DSTARTS={starts}"]
    subprocess.run([str(compiler), *flags, "-o", made, written], check=True, timeout=60)
    return str(made)


@needs_compiler
def test_what_the_library_tells(tmp_path: Path) -> None:
    first, second = Gpus(library(tmp_path)).wait(10)
    assert first == GpuView(
        index=0,
        name="NVIDIA H100",
        utilisation=0.87,
        memory_used=20 << 30,
        memory_total=80 << 30,
        temperature_c=61.0,
        power_w=350.5,
    )
    assert second == GpuView(index=1, name="Idle")


@needs_compiler
def test_it_is_asked_again_when_the_figures_are_old(tmp_path: Path) -> None:
    now = [0.0]
    gpus = Gpus(library(tmp_path), clock=lambda: now[0])
    assert gpus() == ()  # it is being read
    heat = [gpus.wait(10)[0].temperature_c, gpus.wait(10)[0].temperature_c]
    now[0] += KEPT_S
    heat.append(gpus.wait(10)[0].temperature_c)
    assert heat[0] == heat[1]
    assert heat[2] != heat[1]


@needs_compiler
@pytest.mark.parametrize("what", ["does not start", "lacks a function"])
def test_a_driver_that_does_not_work_is_none(tmp_path: Path, what: str) -> None:
    if what == "lacks a function":
        path = library(tmp_path, source=NVML.replace("nvmlDeviceGetPowerUsage", "other"))
    else:
        path = library(tmp_path, starts=9)
    assert Gpus(path).wait(10) == ()


def test_without_a_driver_nothing_is_asked_again() -> None:
    gpus = Gpus("libno-such-driver.so.1")
    assert gpus.wait(10) == ()
    before = gpus._reading
    assert gpus() == ()
    assert gpus._reading is before


def test_the_machine_has_them(tmp_path: Path) -> None:
    cards = (GpuView(index=0, name="a"),)
    assert Machine(tmp_path, lambda: cards)().gpus == cards
    assert Machine(tmp_path)().gpus == ()
