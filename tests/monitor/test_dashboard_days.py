"""A tab of the dashboard that stays open: answers that are late, restarts, what is read out."""

from __future__ import annotations

import re
from typing import Any

from browser_kit import FILLED, IN_A_BROWSER, UPDATES, Page, served, text
from dashboard_kit import Imagined

from node.monitor.api import ApiServer, make_app

pytestmark = IN_A_BROWSER
# answers whose path has this in it wait until they are let go, the oldest first
HOLD = """(() => {{
  const real = window.fetch;
  window.held = [];
  window.fetch = async (path, options) => {{
    const answer = await real(path, options);
    if (path.includes({part!r})) await new Promise((done) => window.held.push(done));
    return answer;
  }};
}})()"""
# what is asked for
NOTE = """(() => {
  const real = window.fetch;
  window.asked = [];
  window.fetch = (path, options) => (window.asked.push(path), real(path, options));
})()"""
# what is said of the connection
SAID = """(() => {
  window.said = [];
  const pill = document.querySelector('#connection');
  new MutationObserver(() => window.said.push(pill.textContent)).observe(pill, {childList: true});
})()"""
LIVE = "document.querySelector('#connection').dataset.state === 'live'"
SUMMARY = text("#loss .words")


def choose(number: int) -> str:
    return f"document.querySelectorAll('#range input')[{number}].click()"


async def listeners(page: Page, target: str, kind: str) -> int:
    """How many the page has for an event."""
    there = (await page.send("Runtime.evaluate", expression=target))["result"]["objectId"]
    found = await page.send("DOMDebugger.getEventListeners", objectId=there)
    return sum(one["type"] == kind for one in found["listeners"])


async def test_a_round_that_comes_while_the_range_is_asked_for_is_not_lost(page: Page) -> None:
    swarm = Imagined(3, 60)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        await page.evaluate(HOLD.format(part="/history"))
        await page.evaluate(choose(3))
        await page.until("window.held.length === 1")
        swarm.step()
        await page.until(f"{text('#loss .legend')}.includes('Round 60')")
        await page.evaluate("window.held.shift()()")
        await page.until(f"/from .* at round 3\\d/.test({SUMMARY})")
        assert "Round 60" in await page.evaluate(text("#loss .legend"))
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_of_two_ranges_the_last_one_counts_whichever_answer_comes_first(page: Page) -> None:
    async with served(Imagined(3, 300)) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        await page.evaluate(HOLD.format(part="/history"))
        await page.evaluate(choose(2))
        await page.until("window.held.length === 1")
        await page.evaluate(choose(3))
        await page.until("window.held.length === 2")
        await page.evaluate("window.held.pop()()")
        newest = f"/from .* at round (27|28)\\d/.test({SUMMARY})"
        await page.until(newest)
        await page.evaluate("window.held.pop()()")
        updates = await page.evaluate(UPDATES)
        await page.until(f"{UPDATES} > {updates} + 1")
        assert await page.evaluate(newest), await page.evaluate(SUMMARY)


async def test_a_range_that_could_not_be_had_is_asked_for_again(page: Page) -> None:
    async with served(Imagined(3, 300)) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        await page.evaluate(
            "window.failed = 0; const real = window.fetch; window.fetch = (path, options) =>"
            " path.includes('/history') && !window.failed++"
            " ? Promise.reject(new TypeError('Failed to fetch')) : real(path, options)"
        )
        await page.evaluate(choose(3))
        await page.until(f"/from .* at round (27|28)\\d/.test({SUMMARY})")
        assert await page.evaluate("window.failed") == 2
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_the_legends_follow_the_columns_that_are_asked_for_anew(page: Page) -> None:
    swarm = Imagined(12, 20)  # more islands than are named: a median, made anew by each drawing
    newest = (
        "[...document.querySelectorAll('#loss details tbody tr:first-child > *')]"
        ".map(e => e.textContent)"
    )
    legend = "[...document.querySelectorAll('#loss .legend b')].map(e => e.textContent)"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        await page.evaluate("document.querySelector('#loss summary').click()")
        await page.evaluate(NOTE)
        for _ in range(65):
            swarm.step()
        await page.until("window.asked.some((path) => path.includes('/history'))")
        for _ in range(100):
            swarm.step()
        assert (swarm.round - 1) % 4 == 0  # whose validation loss is measured
        await page.until(f"{text('#loss .legend')}.includes('Round {swarm.round - 1}')")
        number, *values = await page.evaluate(newest)
        assert number == str(swarm.round - 1)
        assert len(values) == 3
        assert await page.evaluate(legend) == values


async def test_restarts_of_the_node_leave_nothing_behind_in_the_page(page: Page) -> None:
    async with served(Imagined(3, 10)) as url:
        await page.go(url)
        await page.until(LIVE)
        before = [await listeners(page, *one) for one in WATCHED]
        port = url.rsplit(":", 1)[1].strip("/")
    for rounds in (20, 30):
        other = Imagined(3, rounds)
        server = ApiServer(make_app(other.state, other.log, other.history), f"127.0.0.1:{port}")
        try:
            await server.start()
            await page.until(f"{text('#loss .legend')}.includes('Round {rounds - 1}')")
            await page.until(LIVE)
        finally:
            await server.aclose()
    assert [await listeners(page, *one) for one in WATCHED] == before


async def test_what_a_node_that_is_gone_told_last_does_not_look_live(page: Page) -> None:
    shown = "getComputedStyle(document.querySelector('#main')).opacity"
    async with served(Imagined(3, 10)) as url:
        await page.go(url)
        await page.until(LIVE)
        assert not (await page.evaluate("document.title")).startswith("\u25b2")
        assert await page.evaluate(shown) == "1"
        await page.evaluate(NOTE)
        await page.evaluate(SAID)
        port = url.rsplit(":", 1)[1].strip("/")
    await page.until("window.asked.filter((path) => path.includes('/stream')).length > 1")
    (told,) = await page.evaluate("[...new Set(window.said)]")  # not each try anew
    assert re.fullmatch(r"no answer since \d\d:\d\d", told)
    assert (await page.evaluate("document.title")).startswith("\u25b2 ")
    assert await page.evaluate(shown) == "0.7"
    other = Imagined(3, 20)
    server = ApiServer(make_app(other.state, other.log, other.history), f"127.0.0.1:{port}")
    try:
        await server.start()
        await page.until(LIVE)
        await page.until(f"{shown} === '1' && !document.title.startsWith('\u25b2')")
    finally:
        await server.aclose()


WATCHED = (("document", "visibilitychange"), ("window", "online"))


async def test_an_answer_that_never_comes_is_asked_for_again(page: Page) -> None:
    async with served(Imagined(3, 10)) as url:
        await page.send(
            "Page.addScriptToEvaluateOnNewDocument",
            source="""window.asked = 0;
              const real = window.fetch;
              window.fetch = (path, options) => path.includes('/dashboard') && !window.asked++
                ? new Promise((_, fail) => options.signal?.addEventListener('abort', () =>
                    fail(options.signal.reason)))
                : real(path, options);""",
        )
        await page.go(url)
        await page.until(FILLED)
        assert await page.evaluate("window.asked") == 2


async def test_a_browser_that_keeps_nothing_shows_the_dashboard(page: Page) -> None:
    async with served(Imagined(3, 10), key="k" * 20) as url:
        await page.send(
            "Page.addScriptToEvaluateOnNewDocument",
            source="""for (const name of ['localStorage', 'sessionStorage'])
              Object.defineProperty(window, name, {get() { throw new DOMException('no'); }});""",
        )
        await page.go(f"{url}#key={'k' * 20}")
        await page.until(f"{UPDATES} > 0")
        await page.evaluate("document.querySelector('#theme').click()")
        assert await page.evaluate("document.documentElement.dataset.theme") == "light"
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_nothing_that_changes_by_itself_is_read_out(page: Page) -> None:
    """An alarm is said when it comes; the seconds in it, and the ages of links, are not."""
    swarm = Imagined(12, 20)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        swarm.now += 100_000.0
        await page.until("document.querySelectorAll('#alarms .what').length > 0")
        assert await page.evaluate(how_read("#alarms .what")) == "off"
        assert await page.evaluate(how_read("#alarms > div")) == "assertive"
        await page.until(f"{text('#links .words')}.includes('→')")
        assert await page.evaluate(how_read("#links .words")) == "off"
        assert await page.evaluate(text("#links .sr[aria-live=polite]")) == ""
        await page.evaluate("document.querySelector('canvas.matrix').focus()")
        await page.press("ArrowRight")
        spoken: Any = await page.evaluate(text("#links .sr[aria-live=polite]"))
        assert "→" in spoken


def how_read(selector: str) -> str:
    """How changes of an element's text are told by screen readers (WAI-ARIA 1.2, aria-live)."""
    return (
        f"(() => {{ const e = document.querySelector({selector!r})"
        ".closest('[aria-live], [role=alert], [role=status]');"
        " return !e ? 'off' : e.getAttribute('aria-live')"
        " ?? (e.role === 'alert' ? 'assertive' : 'polite'); })()"
    )


HIDE = (
    "Object.defineProperty(document, 'hidden', {{value: {}, configurable: true}});"
    " document.dispatchEvent(new Event('visibilitychange'))"
)
# a node that takes questions and never answers
MUTE = (
    "window.fetch = (path, {signal}) => new Promise((_, fail) =>"
    " signal.addEventListener('abort', () => fail(signal.reason)))"
)


async def test_what_was_shown_while_nobody_looked_is_not_called_live(page: Page) -> None:
    async with served(Imagined(3, 20)) as url:
        await page.go(url)
        await page.until(LIVE)
        await page.evaluate(HIDE.format("true"))
        assert not await page.evaluate(LIVE)
        await page.evaluate(MUTE)
        await page.evaluate(HIDE.format("false"))
        await page.until(f"{text('#connection')} === 'connecting'")
        assert not await page.evaluate(LIVE)


async def test_a_tab_in_the_background_asks_for_no_updates(page: Page) -> None:
    never = "Object.defineProperty(document, 'hidden', {value: true, configurable: true})"
    await page.send("Page.addScriptToEvaluateOnNewDocument", source=never + ";" + NOTE)
    async with served(Imagined(3, 20)) as url:
        await page.go(url)
        await page.until(FILLED)  # a tab that is looked at has asked for both by then
        asked = await page.evaluate("window.asked")
        assert [path for path in asked if "/dashboard" in path]
        assert not [path for path in asked if "/stream" in path or "/links" in path]
        assert await page.evaluate(UPDATES) == 0
        await page.evaluate(HIDE.format("false"))
        await page.until(LIVE)
        assert [path for path in await page.evaluate("window.asked") if "/stream" in path]
