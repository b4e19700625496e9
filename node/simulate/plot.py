"""The loss of a simulated run against virtual time and against bytes sent, as an image."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from node.simulate.run import codecs_of
from node.simulate.world import Result

mpl.use("agg")


def check(path: Path) -> None:
    """Raise ValueError where no image of this kind can be drawn."""
    figure = Figure(figsize=(1, 1))
    figure.suptitle("loss")
    kinds = figure.canvas.get_supported_filetypes()
    kind = path.suffix.lstrip(".").lower()
    if kind not in kinds:
        raise ValueError(f"{path.name}: the kinds of images are {', '.join(sorted(kinds))}")
    try:  # some need other programs, such as LaTeX
        figure.savefig(BytesIO(), format=kind)
    except Exception as error:  # each of them fails in its own way
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from error


def draw(result: Result, path: Path) -> None:
    """Two panels; the format follows from the file's name. Raises OSError, ValueError."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    losses = [point.loss for point in result.points]
    by_time.plot([point.time for point in result.points], losses)
    by_time.set(xlabel="virtual seconds", ylabel="validation loss, nats a byte")
    by_bytes.plot([point.bytes for point in result.points], losses)
    by_bytes.set(xlabel="bytes an island sent a parameter")
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.3)
    one = result.scenario
    figure.suptitle(f"{one.mode}, {one.islands} islands, {', '.join(codecs_of(one))}")
    figure.savefig(path, dpi=110)
