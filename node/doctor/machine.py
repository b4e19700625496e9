"""The machine: GPU and driver, disk, memory, clock, ports. Without torch and without peers."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path

from bootstrap.manifest import Manifest, Model
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import bytes_in
from node.config import NodeConfig
from node.doctor.finding import Finding, fail, failed, ok, warn
from node.doctor.software import INSTALL, torch_cuda, torch_rocm
from node.monitor.machine import Machine
from node.setting_values import host_port
from node.statedir import StateDir
from protocols.connections.listening import EVERY_IPV4, listen_on
from protocols.errors import OperatorError
from protocols.lanes.socket import prefer_bbr

# the oldest driver for each major version of CUDA: docs.nvidia.com/deploy/cuda-compatibility
OLDEST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580, 65, 6)}
# fp32 vectors that outer optimizers keep, as their rules say (diloco.optimizers, which needs torch)
OUTER_VECTORS = {"sgd": 0, "sparseloco": 0, "nesterov": 1, "heavyball": 1}
MOST_OUTER_VECTORS = 2  # of the others
WORKING_VECTORS = 3  # `sent`, the gradient and one to work on
STAGED_VECTORS = 3  # θ and Adam's two moments, copied for a checkpoint that is being written
DEVICE_VECTORS = 4  # these three and the gradient: not in this memory where a GPU trains
UNKNOWN = "what the run needs is not known: no peer has told which one it is"
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised
_IMPORT_S = 120.0
# the kernel's driver for AMD's GPUs, and what it has found: docs.kernel.org/gpu/amdgpu
KFD = Path("/dev/kfd")
KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def gpu(device: str) -> Finding:
    """The GPUs, their driver, and whether this torch can use them."""
    cards, driver = _nvidia()
    built = torch_cuda()
    if built is None:
        return fail("gpu", "torch is not installed", "it trains the model", INSTALL)
    version, cuda = built
    told = f"{cards}, driver {driver}" if cards else "no NVIDIA GPU"
    if (amd := _amd()) and (torch_rocm() or not cards):
        return _amd_gpu(device, amd, version)
    if device == "cpu":
        return ok("gpu", f"{told}; not used, as --device is cpu")
    if not cards:
        if device == "cuda":
            return fail(
                "gpu",
                told,
                f"--device cuda wants one, and nvidia-smi shows none, nor is there AMD's {KFD}",
                "install the driver, give the container its GPUs, or use --device cpu",
            )
        return ok("gpu", f"{told}: the processor trains")
    if not cuda:
        return warn(
            "gpu",
            f"{told}; torch {version} is built without CUDA",
            "so the processor would train",
            "install torch for CUDA: pip install torch --index-url "
            "https://download.pytorch.org/whl/cu128",
        )
    oldest = OLDEST_DRIVER.get(int(cuda.partition(".")[0]))
    numbers = tuple(map(int, re.findall(r"\d+", driver)))  # none in what some drivers answer
    if oldest and numbers and numbers < oldest:
        return fail(
            "gpu",
            f"{told}; torch {version} for CUDA {cuda}",
            f"E403: CUDA {cuda} needs driver {'.'.join(map(str, oldest))} or newer",
            "update the driver, or install torch for an older CUDA",
        )
    return ok("gpu", f"{told}; torch {version} for CUDA {cuda}")


def _amd_gpu(device: str, count: int, version: str) -> Finding:
    """ROCm's torch takes AMD's GPUs for CUDA devices; nobody has tried Atoll on one."""
    told = f"{count} AMD {'GPU' if count == 1 else 'GPUs'}"
    if device == "cpu":
        return ok("gpu", f"{told}; not used, as --device is cpu")
    if hip := torch_rocm():
        return warn(
            "gpu",
            f"{told}; torch {version} for ROCm (HIP {hip})",
            "Atoll was not tested on AMD GPUs",
            "see what this says of torch, and whether it trains; else use --device cpu",
        )
    without = f"{told}; torch {version} is built without ROCm"
    if device == "cuda":
        return fail(
            "gpu",
            without,
            "--device cuda wants a GPU that this torch can use",
            "install torch for ROCm as pytorch.org says (Atoll was not tested with it), or use "
            "--device cpu",
        )
    return ok("gpu", f"{without}, and Atoll not tested with it: the processor trains")


def _amd() -> int:
    """How many GPUs the kernel's driver for ROCm has found: processors are nodes without SIMDs."""
    if not KFD.exists():
        return 0
    count = 0
    for properties in KFD_NODES.glob("*/properties"):
        with suppress(OSError):
            count += bool(re.search(r"^simd_count [1-9]", properties.read_text(), re.MULTILINE))
    return count


def _nvidia() -> tuple[str, str]:
    """The cards in words and the driver's version; empty where there are none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "", ""
    wanted = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            [program, wanted, "--format=csv,noheader"],
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.SubprocessError):
        return "", ""
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    if not rows:
        return "", ""
    return f"{len(rows)} x {rows[0][0]} with {rows[0][1]}", rows[0][2]


def torch_works(device: str) -> Finding:
    """Import torch in a process of its own and have it add two numbers where it would train."""
    code = (
        "import sys, torch; cuda = torch.cuda.is_available() and sys.argv[1] != 'cpu';"
        "sys.exit('no CUDA device') if sys.argv[1] == 'cuda' and not cuda else None;"
        "d = 'cuda' if cuda else 'cpu';"
        "x = torch.ones(64, 64, device=d); assert (x @ x).sum().item() == 64**3;"
        "print(d if d == 'cpu' else torch.cuda.get_device_name())"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, device],
            check=False,
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
        )
    except subprocess.TimeoutExpired:
        why = f"it was not there after {_IMPORT_S:.0f} s"
        return fail("torch", "import does not end", why, "reinstall torch, or look at the disk")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return fail(
            "torch",
            "it does not compute",
            last[:300],
            "reinstall torch for this machine, or use --device cpu",
        )
    return ok("torch", f"computes on {done.stdout.strip()}")


def _parameters_of(manifest: Manifest) -> int | None:
    """Parameters of a run, None where they cannot be told; its scripts have counted theirs."""
    if manifest.script.parameters:
        return manifest.script.parameters
    if manifest.model.kind == "hf":
        return _counted(manifest.model.model_dump_json())
    return parameters(manifest.model)


@cache
def _counted(model: str) -> int | None:
    """Parameters of a model of transformers, which only that library knows, with torch.

    In a process of its own. None where it cannot be built here: a start says why.
    """
    code = (
        "import sys; from bootstrap.manifest import Model; from node.trainer.layout import Layout;"
        "print(Layout.of_config(Model.model_validate_json(sys.stdin.read())).size)"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=model,
            check=True,
            capture_output=True,
            text=True,
            timeout=_IMPORT_S,
        )
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _unknown(manifest: Manifest | None) -> str:
    if manifest is None:
        return UNKNOWN
    return f"what run {manifest.label} needs is not known: its model cannot be built here"


def parameters(model: Model) -> int:
    """Parameters of a model of ours, by its shapes: what ``node.trainer.layout`` counts."""
    d, layers, kv = model.d_model, model.n_layers, model.d_model // model.n_heads * model.n_kv_heads
    embeddings = model.vocab_size * d * (1 if model.tied_embeddings else 2)
    feed_forward = 3 * d * model.d_ff * max(1, model.experts) + d * model.experts  # and a router
    return embeddings + layers * (2 * d * d + 2 * d * kv + feed_forward + 2 * d) + d


def disk(config: NodeConfig, manifest: Manifest | None) -> Finding:
    """Whether the state directory can be written, and holds the checkpoints of the model.

    As :meth:`~node.checkpoints.checkpoint.CheckpointStore.preflight`: those to keep and the best
    one, one being written, and one that is still being copied to a second place. ``manifest`` is
    None where nobody could tell the run.
    """
    there = next(p for p in (config.dir, *config.dir.parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return fail(
            "disk",
            f"{there} cannot be written",
            "E105: a node keeps its key and its checkpoints in its state directory",
            "give a directory this user may write with --dir",
        )
    free = shutil.disk_usage(there).free
    if not config.checkpoint_every:
        return ok("disk", f"{_mib(free)} free at {there}; no checkpoints are written")
    newest, held = _checkpoints(StateDir(config.dir).checkpoints)
    if newest:
        size, whose, more = newest, "the newest one there", " more"
    elif manifest is not None and (elements := _parameters_of(manifest)) is not None:
        size = 4 * floats_saved(manifest) * elements
        whose, more = f"run {manifest.label}", ""
    else:
        return ok("disk", f"{_mib(free)} free at {there}; {_unknown(manifest)}")
    evaluated = manifest is None or bool(manifest.rounds.eval_every)
    count = config.keep_checkpoints + 1 + bool(config.checkpoint_copy) + evaluated
    needed = max(0, count * size - held)
    found = f"{_mib(free)} free at {there}; {count} checkpoints of {whose}: {_mib(needed)}{more}"
    if free < needed:
        why = "E402: without room for them a node does not start"
        return fail("disk", found, why, "free some space, or give another --dir")
    return ok("disk", found)


def _checkpoints(directory: Path) -> tuple[int, int]:
    """Bytes of the newest checkpoint there, and of all that the disk holds for them already."""
    store = CheckpointStore(directory, owns=False)
    try:
        return next((bytes_in(path) for path in store.paths()), 0), store.held()
    except OSError:
        return 0, 0


def floats_saved(manifest: Manifest) -> int:
    """As :func:`node.checkpoints.saving.floats_saved`: fp32 numbers a parameter in a checkpoint."""
    rule = manifest.outer.optimizer
    later = manifest.rounds.feeds_back or rule == "powersgd"  # what was lost of what was sent
    return 4 + OUTER_VECTORS.get(rule, MOST_OUTER_VECTORS) + later


def needed_bytes(config: NodeConfig, manifest: Manifest, elements: int, *, gpu: bool) -> int:
    """What an island takes of a host's memory at its peak, while a checkpoint is written.

    ``gpu``: whether one trains. Activations, and what a process takes for itself, come on top.
    """
    vectors = floats_saved(manifest) + WORKING_VECTORS - DEVICE_VECTORS * gpu
    return 4 * elements * (vectors + STAGED_VECTORS * bool(config.checkpoint_every))


def lacking(config: NodeConfig, manifest: Manifest, elements: int, *, gpu: bool) -> str:
    """What an island that starts is to be told of its memory; empty: it is enough, or not known."""
    needed = needed_bytes(config, manifest, elements, gpu=gpu)
    left = Machine(config.dir)().memory_available
    if left is None or left >= needed:
        return ""
    need = f"{_mib(needed)} of memory are needed besides activations"
    return f"{need}, and {_mib(left)} are free: it may run out (E401)"


def memory(config: NodeConfig, manifest: Manifest | None) -> Finding:
    """Whether the model's vectors fit, a checkpoint's copies included; manifest: as of disk."""
    view = Machine(config.dir)()
    needed, wanted = 0, _unknown(manifest)
    if manifest is not None and (elements := _parameters_of(manifest)) is not None:
        built = torch_cuda()
        usable = bool(built and built[1] and _nvidia()[0]) or bool(torch_rocm() and _amd())
        gpu = config.device != "cpu" and usable
        needed = needed_bytes(config, manifest, elements, gpu=gpu)
        wanted = f"{_mib(needed)} needed by run {manifest.label}"
    if view.memory_available is None:
        return ok("memory", f"{wanted}; this system does not tell what it has")
    found = f"{_mib(view.memory_available)} free of {_mib(view.memory_total or 0)}; "
    found += f"{wanted}, {view.cores} cores"
    if view.memory_available < needed:
        why = "E401: optimizer and outer state alone need that"
        if config.checkpoint_every:
            why += f", {STAGED_VECTORS} vectors of it while a checkpoint is written"
        return warn("memory", found, why, "stop other programs, or use a smaller model")
    return ok("memory", found)


def clock() -> Finding:
    """Whether this system keeps its clock by the network's."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512))  # modes 0: only asks
    except (OSError, AttributeError):
        state = -1
    if state < 0:  # there is no such call, or a sandbox does not allow it
        return ok("clock", "this system does not tell whether it keeps time; peers will")
    if state == _TIME_ERROR:
        return warn(
            "clock",
            "nothing keeps this clock in time",
            "signed records expire by wall clock: seconds matter (E301)",
            "sudo timedatectl set-ntp true (or: sudo systemctl enable --now chrony)",
        )
    return ok("clock", "kept in time by the system")


def losses() -> Finding:
    """Whether connections that lose packets can be given BBR (:mod:`protocols.lanes.losses`)."""
    if sys.platform != "linux":
        return ok("losses", "how this system deals with lost packets is its own affair")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        if prefer_bbr(tried):
            return ok("losses", "BBR is there for ways that lose packets")
    return warn(
        "losses",
        "no BBR for this user",
        "over long ways that lose packets rounds take several times as long without it",
        "as root: modprobe tcp_bbr && "
        'sysctl -w net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"',
    )


def ports(config: NodeConfig) -> list[Finding]:
    """Whether the listeners could open; a node that runs here has them already."""
    running = StateDir(config.dir).holder()
    if running is not None:
        return [ok("ports", f"process {running} runs in {config.dir} and has them")]
    with ExitStack() as listeners:  # open until all are tried: two may want one port
        return [
            _port(config, key, where, listeners)
            for key in ("listen", "api", "dashboard")
            if (where := getattr(config, key))
        ]


def _port(config: NodeConfig, key: str, where: str, listeners: ExitStack) -> Finding:
    """Whether one listener can open; it stays so with ``listeners``."""
    try:
        listener = listen_on(where, f"--{key}", for_others=key == "listen")
    except OperatorError as error:
        if error.code == "E303" and config.is_default(key):
            why = f"{error.why}; as nobody asked for this one, a node takes any free one"
            return warn(f"port {key}", error.what, why, error.fix)
        return failed(f"port {key}", error)
    host, bound = host_port(where)[0], listeners.enter_context(listener).getsockname()[0]
    on_all = f"; {host} is loopback here, so a node listens on all addresses"
    return ok(f"port {key}", f"{where} is free{on_all if bound == EVERY_IPV4 != host else ''}")


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB" if size < 2**34 else f"{size / 2**30:,.0f} GiB"
