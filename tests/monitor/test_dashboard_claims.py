"""The dashboard in a browser, where a peer claims what it likes: others' figures stand."""

from __future__ import annotations

from dataclasses import replace

from browser_kit import FILLED, IN_A_BROWSER, UPDATES, Page, served, text
from dashboard_kit import Imagined

from node.monitor.events import Record, RoundDone

pytestmark = IN_A_BROWSER
# what is written on a canvas, as the ends of an axis are
WRITTEN = """
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
    if (this.canvas.closest('#loss')) written.push(text);
    return write.call(this, text, ...rest);
  };
"""


async def test_a_loss_that_is_made_up_leaves_the_chart_to_the_others(page: Page) -> None:
    swarm = Imagined(4, 0)
    liar = swarm.ids[2]

    def lie(record: Record) -> None:
        if isinstance(record.event, RoundDone):
            record.event.islands[liar]["loss"] = 9e11

    swarm.log.unsubscribe(swarm.history)
    swarm.log.subscribe(lie)
    swarm.log.subscribe(swarm.history)
    for _ in range(20):
        swarm.step()
    await page.send("Page.addScriptToEvaluateOnNewDocument", source=WRITTEN)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0 && written.length > 0")
        ends = {float(said) for said in await page.evaluate("written") if "." in said}
        assert ends
        assert max(ends) <= 8
        assert "899999989760" in await page.evaluate(text("#loss .legend"))


async def test_islands_of_one_name_and_of_none_that_can_be_seen_are_told_apart(page: Page) -> None:
    swarm = Imagined(4, 10)
    views, names = swarm.peers, ("alps", "alps\u200b", "\u200b\u3164", "mesa")
    swarm.state.providers.peers = lambda: [
        replace(view, name=name) for view, name in zip(views(), names, strict=True)
    ]
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        first, second, third, _ = (f"…{peer[-6:]}" for peer in swarm.ids)
        for panel in ("#loss .legend", "#waits", "#links"):
            told = await page.evaluate(text(panel))
            assert f"alps {first}" in told, panel
            assert f"alps\u200b {second}" in told, panel
            assert third in told, panel
        assert "mesa …" not in await page.evaluate(text("#waits"))
        shown = "[...document.querySelectorAll('.peers .who')].map(e => e.textContent)"
        assert third in await page.evaluate(shown)


async def test_rows_of_the_past_that_lack_a_figure_leave_no_chart_empty(page: Page) -> None:
    swarm = Imagined(1, 0)
    row = {"outcome": 0.0, "failed": 0.0, "consensus_after": 0.25, "ready": 1.0, "apply": 1.0}
    swarm.history.expect(5)
    swarm.history.learn([{**row, "round": i, "time": 1.79e9 + i} for i in range(5)], {}, 5)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        assert "took 2.0 s" in await page.evaluate(text("#time .words"))
        assert "0.25 from their mean" in await page.evaluate(text("#consensus .words"))
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_a_chart_that_fails_does_not_stop_the_others(page: Page) -> None:
    swarm = Imagined(3, 10)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        await page.evaluate("document.querySelector('#loss .legend').replaceChildren()")
        swarm.step()
        await page.until(f"{text('#time .legend')}.includes('Round 10')")
        assert [error for error in page.errors if "TypeError" in error]


async def test_in_pairs_tokens_are_those_that_each_claims(page: Page) -> None:
    """Nobody certifies any there: this node knows only its own, and each counts its own rounds."""
    swarm = Imagined(3, 0)
    views = swarm.peers
    swarm.state.providers.peers = lambda: [
        replace(view, agrees=None, round=150 - index, total_tokens=1000 * (index + 1))
        for index, view in enumerate(views())
    ]
    islands = {peer: {"loss": 3.0} for peer in swarm.ids} | {swarm.ids[0]: {"tokens": 700.0}}
    rows = "[...document.querySelectorAll('.peers tbody tr')]"
    waits = "#waits .body p"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        swarm.log.emit(RoundDone(round=149, members=2, live=3, agreeing=None, islands=islands))
        await page.until(f"{text(waits)}.includes('in pairs')")
        assert await page.evaluate(text("#peers [data-key=merged_tokens]")) == "Claimed tokens"
        rounds = await page.evaluate(f"{rows}.map(r => [r.cells[2].textContent, r.cells[4].title])")
        assert rounds == [["148", ""], ["149", ""], ["150", ""]]
        told = await page.evaluate(f"{rows}.map(r => r.cells[4].textContent)")
        assert told == ["3,000", "2,000", "1,000"], "and sorted by them"
        shares = "[...document.querySelectorAll('.peers .share')].every(s => s.hidden)"
        assert await page.evaluate(shares)
        assert "merged tokens" not in await page.evaluate(text("#peers .regions"))
        tile = "[...document.querySelectorAll('#stats dt')].find(e => e.textContent === {!r})"
        together = f"{tile.format('Claimed tokens')}.nextSibling.textContent"
        assert await page.evaluate(together) == "6,000"
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_what_the_dead_said_last_is_shown_as_nothing_of_now(page: Page) -> None:
    """Nor is a loss that is no number; the validation loss is, as not every round has one."""
    swarm = Imagined(4, 10)
    views, (_, absent, nan, _) = swarm.peers, swarm.ids
    swarm.state.providers.peers = lambda: [
        replace(view, status="dead", agrees=None) if view.peer == absent else view
        for view in views()
    ]

    def lack(record: Record) -> None:
        if isinstance(record.event, RoundDone):
            del record.event.islands[absent], record.event.islands[nan]["loss"]

    swarm.log.unsubscribe(swarm.history)
    swarm.log.subscribe(lack)
    swarm.log.subscribe(swarm.history)
    legend = "[...document.querySelectorAll('#loss .legend b')].map(e => e.textContent)"
    rows = "[...document.querySelectorAll('.peers tbody tr')]"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        assert "\u2013" not in await page.evaluate(legend)
        swarm.step()
        await page.until(f"{text('#loss .legend')}.includes('Round 10')")
        shown = await page.evaluate(legend)
        assert [value == "\u2013" for value in shown] == [False, True, True, False, False]
        await page.evaluate("document.querySelector('[data-key=tokens_per_second] button').click()")
        told = [await page.evaluate(f"{rows}.map(r => r.cells[{at}].textContent)") for at in (5, 6)]
        assert [told[0][3], told[1][3]] == ["\u2013", "\u2013"], "and sorted as the least"
        assert "\u2013" not in [*told[0][:3], *told[1][:3]]
    assert [error for error in page.errors if "ERR_" not in error] == []
