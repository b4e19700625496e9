"""The picture in the README: the dashboard of a node in a real swarm, in a headless chromium.

    python -m benchmarks.picture --out docs/images/dashboard.png

Islands of one run whose model is merged in fragments train on this machine until ``--rounds`` are
through; then the page of the first one is taken as it stands. ``--all DIR`` writes it for a phone,
a tablet and a wide screen as well, light and dark: to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from node.interrupts import clean_up_at_any_end

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "kits"))  # the kits of the browser and swarm tests

NAMES = ("alps", "fjord", "mesa", "reef", "dune", "moor")
RUN = {
    "inner_steps": 24,
    "fragments": 3,
    "total_rounds": 400,
    "min_grace_s": 2.0,
    "model__n_layers": 3,
    "data__batch_size": 2,
}
SHAPES = {"phone": (390, 844), "tablet": (820, 1180), "wide": (1440, 900)}
FILLED = "document.documentElement.dataset.filled"
START_S = 150.0


async def take(url: str, shapes: dict[Path, tuple[int, int, bool]]) -> dict[Path, bytes]:
    """A PNG for each width, height and whether it is dark; the first one no taller than that."""
    from browser_kit import browser

    shots: dict[Path, bytes] = {}
    with tempfile.TemporaryDirectory() as profile:
        async with browser(Path(profile) / "profile") as page:
            await page.send("Emulation.setScrollbarsHidden", hidden=True)
            for where, (width, height, dark) in shapes.items():
                await page.shape(width, height, dark=dark)
                await page.go(url)
                await page.until(FILLED)
                await page.until("document.querySelectorAll('.waits li').length >= 2")
                shots[where] = await page.picture(whole=bool(shots))
    return shots


def main() -> int:
    """Start the islands, wait, take the pictures, end the islands."""
    clean_up_at_any_end()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images" / "dashboard.png")
    parser.add_argument("--all", type=Path, help="a folder for pictures of all sizes")
    parser.add_argument("--islands", type=int, default=4, choices=range(2, 1 + len(NAMES)))
    parser.add_argument("--rounds", type=int, default=12, help="to wait for, of every fragment")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--height", type=int, default=1462)
    given = parser.parse_args()
    from swarm_kit import Island, islands, settings, until

    from node.status import find

    if given.all:
        given.all.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, islands(Path(root)) as made:
        for name in NAMES[: given.islands]:
            island = Island(name, Path(root))
            if made.all:
                island.start("--peers", made.all[0].await_up(START_S), "--region", name)
            else:
                island.start(*settings(**RUN), "--region", name)
            made.all.append(island)
        first = made.all[0]

        def enough() -> bool:
            done = [e for e in first.events("round") if e["members"] == given.islands]
            return len(done) >= given.rounds * int(RUN["fragments"])

        until(enough, 10 * START_S, f"{given.rounds} rounds of all", first.tail)
        api, _ = find(first.dir)
        wanted = {given.out: (given.width, given.height, False)}
        for name, (width, height) in SHAPES.items() if given.all else ():
            for dark in (False, True):
                tone = "dark" if dark else "light"
                wanted[given.all / f"{name}-{tone}.png"] = (width, height, dark)
        for where, shot in asyncio.run(take(f"http://{api}/", wanted)).items():
            where.write_bytes(shot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
