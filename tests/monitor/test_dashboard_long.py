"""The dashboard in a browser, of a run with more rounds than its charts have points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from browser_kit import FILLED, IN_A_BROWSER, UPDATES, Page, served, text
from dashboard_kit import Imagined

from node.monitor.events import Event, RoundDone
from node.monitor.history import History

pytestmark = IN_A_BROWSER
TILES = (
    "Object.fromEntries([...document.querySelectorAll('#stats > div')]"
    ".map(tile => [...tile.children].map(e => e.textContent)).map(([n, ...rest]) => [n, rest]))"
)
CHARTS = ("loss", "consensus", "time")


def step(swarm: Imagined, **changes: object) -> None:
    """One more round, in which things were otherwise."""
    emit = swarm.log.emit

    def changed(event: Event) -> None:
        emit(replace(event, **changes) if isinstance(event, RoundDone) else event)

    swarm.log.emit = changed  # type: ignore[method-assign, assignment]
    swarm.step()
    swarm.log.emit = emit  # type: ignore[method-assign]


@pytest.fixture
def swarm() -> Imagined:
    """Of 1,441 rounds, in the last of which everything went wrong."""
    swarm = Imagined(3, 1440)
    phases = {"compute": 10.0, "ready": 1.0, "exchange": 60.0, "apply": 1.0}
    bad = {"validation_loss": 7.5, "loss": 7.25, "consensus": 0.9, "utilisation": 0.12}
    step(swarm, phases=phases, **bad)
    return swarm


async def test_what_is_told_of_the_newest_round_is_mixed_with_no_other(
    page: Page, swarm: Imagined
) -> None:
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        tiles = await page.evaluate(TILES)
        assert tiles["Validation loss"][0] == "7.500"
        assert tiles["Validation loss"][1].endswith("training 7.250")
        assert tiles["Validation loss"][1].startswith("from about ")
        assert tiles["Computing"][0] == "12 %"
        loss, apart, time = [await page.evaluate(text(f"#{one} .words")) for one in CHARTS]
        assert loss.startswith("Validation loss 7.500 at round 1440, from ")
        assert ", from " in loss
        assert "as the mean of rounds 0 to 4;" in loss
        assert apart.startswith("Islands were 0.9 from their mean before round 1440 was merged, 0 ")
        assert time.startswith("The last merge took 1 min from snapshot")
        assert "12 % of that round were inner steps" in time
        legend = await page.evaluate(text("#consensus .legend"))
        assert legend.startswith("Round 1,440before the merge 0.9")
        await page.evaluate("document.querySelector('#time .plot').focus()")
        await page.press("ArrowLeft")
        assert "Rounds 1,435 to 1,439, mean" in await page.evaluate(text("#time .legend"))
        await page.evaluate("document.querySelector('#consensus summary').click()")
        heads = "[...document.querySelectorAll('#consensus tbody th')].map(e => e.textContent)"
        await page.until(f"{heads}.length === 20")
        assert (await page.evaluate(heads))[:3] == ["1440", "1435 to 1439", "1430 to 1434"]


async def test_a_round_that_comes_to_an_open_page_is_a_point_of_its_own(
    page: Page, swarm: Imagined
) -> None:
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        other = {"validation_loss": None, "phases": {}, "utilisation": None}
        step(swarm, consensus=0.7, **other)
        await page.until(f"{text('#consensus .legend')}.startsWith('Round 1,441')")
        loss, apart, time = [await page.evaluate(text(f"#{one} .words")) for one in CHARTS]
        assert loss.startswith("Validation loss 7.500 at round 1440, from ")
        assert apart.startswith("Islands were 0.7 from their mean before round 1441 was merged")
        assert time.startswith("The last merge took 1 min")
        assert (await page.evaluate(TILES))["Validation loss"][0] == "7.500"
        await page.evaluate("document.querySelector('#consensus .plot').focus()")
        await page.press("ArrowLeft")
        assert "Round 1,440" in await page.evaluate(text("#consensus .legend"))
        step(swarm, **other)
        await page.go(url)
        await page.until(FILLED)
        loss, _, time = [await page.evaluate(text(f"#{one} .words")) for one in CHARTS]
        assert loss.startswith("Validation loss 7.500 at round 1440, from ")
        assert "validation 7.50" in await page.evaluate(text("#loss .legend"))
        assert time.startswith("Merges of rounds 1440 to 1441 took, in the mean, ")
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_a_node_that_was_restarted_shows_how_the_run_stood(
    page: Page, tmp_path: Path
) -> None:
    """Until its next round, which may take hours."""
    path = tmp_path / "history.jsonl"
    history = History(path)
    history.begin("8c41")
    before = Imagined(3, 0)
    before.log.unsubscribe(before.history)
    before.log.subscribe(history)
    for _ in range(720):
        before.step()
    step(before, validation_loss=None, consensus=0.25, utilisation=0.5)
    again = History(path)
    again.begin("8c41")
    async with served(Imagined(3, 0, history=again)) as url:
        await page.go(url)
        await page.until(FILLED)
        told = "No round since this node started."
        assert await page.evaluate(text("#rounds .body")) == told
        assert await page.evaluate(text("#waits .body")) == "Shown with the next round."
        tiles = await page.evaluate(TILES)
        assert tiles["Consensus"] == ["0.25", "from the mean before round 720"]
        assert tiles["Computing"][0] == "50 %"
        assert tiles["Validation loss"][0].startswith("\u2248 "), "which the newest round lacks"
        assert tiles["Validation loss"][1].startswith("from about ")
    assert [error for error in page.errors if "ERR_" not in error] == []
