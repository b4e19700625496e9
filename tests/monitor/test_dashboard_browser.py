"""The dashboard in a headless chromium: a large imagined swarm, and a small real one.

``make test-browser``. What it costs is measured by benchmarks/operators.py.
How it is read and used without a mouse: tests/monitor/test_dashboard_reading.py.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from browser_kit import FILLED, IN_A_BROWSER, UPDATES, Page, served, text
from dashboard_kit import Imagined
from node_process import nodes

from node.monitor.alarms import Alarm
from node.monitor.api import ApiServer, make_app
from node.monitor.events import JoinProgress, Rejected, RoundDone, RoundFailed
from node.monitor.views import KnownLinks, LinkView

pytestmark = IN_A_BROWSER
KEY = "k" * 20
PANELS = (
    "loss",
    "consensus",
    "rounds",
    "waits",
    "time",
    "network",
    "steps",
    "peers",
    "links",
    "trust",
    "node",
    "log",
)
ROUNDS = "[...document.querySelectorAll('#rounds tbody th')].map(e => e.textContent)"
ACTIVE = "[...document.querySelectorAll('.peers tbody tr[data-status=active]')].length"


async def test_ten_thousand_rounds_and_64_islands(page: Page) -> None:
    swarm = Imagined(64, 10_000)
    async with served(swarm) as url:
        await page.go(url)
        filled = int(await page.until(FILLED)) / 1000
        sizes = await page.evaluate(
            "performance.getEntriesByType('resource').map(r => [r.name, r.decodedBodySize])"
        )
        data = sum(size for name, size in sizes if "/api/" in name)
        print(f"filled after {filled:.2f} s; {data} bytes")  # noqa: T201 - for who runs it with -s
        assert data < 1_000_000
        assert await page.evaluate("document.querySelectorAll('.peers tbody tr').length") == 64
        assert await page.evaluate("document.querySelectorAll('canvas.matrix').length") == 1
        for panel in PANELS:
            assert len(await page.evaluate(text(f"#{panel} .body"))) > 20, panel
        tile = "[...document.querySelectorAll('#stats .note')].map(e => e.textContent)"
        speeds = [note for note in await page.evaluate(tile) if "tokens/s" in note]
        assert [note.split("tokens/s ")[1] for note in speeds] == [
            "together, while computing",
            "here, while computing",
        ]
        assert "Tokens a second while computing" in await page.evaluate(text("#steps"))
        weights = await page.evaluate(text("#waits .weights"))
        assert re.fullmatch(r"isle-03: 42\s?% of its share", weights), weights
        drawn = await page.evaluate("document.querySelectorAll('.uplot canvas').length")
        assert drawn == 6
        assert len(await page.evaluate("[...document.querySelectorAll('.regions li')]")) == 6
        gpus = await page.evaluate("document.querySelectorAll('#node [aria-label^=GPU]').length")
        assert gpus == 8
        await page.until(f"{text('#links')}.includes('Slowest to send')")
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_updates_arrive_and_a_restart_of_the_node_is_survived(page: Page) -> None:
    swarm = Imagined(3, 20)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        assert await page.evaluate("document.querySelector('#connection').dataset.state") == "live"
        assert "Round 19" in await page.evaluate(text("#loss .legend"))
        told = text("#rounds .words")
        assert await page.evaluate(told) == "Since this node started: 3 degraded, 17 committed."
        swarm.log.emit(RoundFailed(round=20, reason="no majority"))
        await page.until(f"{told}.includes('17 committed, 1 failed')")
        swarm.step()
        await page.until(f"{told}.includes('18 committed, 1 failed')")
        await page.until(f"{text('#loss .legend')}.includes('Round 20')")
        await page.until(f"{text('#waits-title')}.includes('round 20')")
        port = url.rsplit(":", 1)[1].strip("/")
    await page.until("document.querySelector('#connection').dataset.state === 'off'")
    other = Imagined(3, 40)  # another process at the same address
    server = ApiServer(make_app(other.state, other.log, other.history), f"127.0.0.1:{port}")
    try:
        await server.start()
        await page.until(f"{text('#loss .legend')}.includes('Round 39')")
        await page.until("document.querySelector('#connection').dataset.state === 'live'")
    finally:
        await server.aclose()


async def test_alarms_are_said_and_texts_of_peers_are_no_markup(page: Page) -> None:
    swarm = Imagined(4, 20)
    views = swarm.peers
    evil = "<img src=x onerror=alert(1)>"
    swarm.log.emit(Rejected(peer=swarm.ids[1], reason="malformed", detail=evil))
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        assert await page.evaluate(text("#alarms")) == ""
        assert await page.evaluate("document.querySelector('#alarms').role") == "alert"
        swarm.state.providers.peers = lambda: [
            replace(view, agrees=False, name=evil) if index == 2 else view
            for index, view in enumerate(views())
        ]
        await page.until(f"{text('#alarms')}.includes('The swarm has split')")
        assert evil in await page.evaluate(text("#alarms"))
        assert evil in await page.evaluate(text("#log"))
        assert await page.evaluate("document.querySelectorAll('main img').length") == 0
        swarm.state.providers.peers = views
        await page.until(f"{text('#alarms')} === ''")
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_an_alarm_says_what_to_do_as_it_is_now(page: Page) -> None:
    """One that stands gets another advice when it turns out what is wrong."""
    swarm, fix = Imagined(4, 20), ["See who is silent."]
    swarm.state.alarms = lambda views: [  # type: ignore[method-assign]
        Alarm("stall", "warning", "No round.", fix[0])
    ]
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{text('#alarms')}.includes('No round. See who is silent.')")
        fix[0] = "Its trainer is stuck."
        await page.until(f"{text('#alarms')}.includes('No round. Its trainer is stuck.')")
        assert "silent" not in str(await page.evaluate(text("#alarms")))


async def test_a_panel_that_fails_does_not_stop_the_others(page: Page) -> None:
    swarm = Imagined(4, 20)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{FILLED} && document.querySelectorAll('.peers tbody tr').length === 4")
        await page.evaluate("document.querySelector('#run').remove()")
        views = swarm.peers()
        swarm.state.providers.peers = lambda: views[:3]
        await page.until("document.querySelectorAll('.peers tbody tr').length === 3")
        assert [error for error in page.errors if "TypeError" in error]


async def test_a_name_cannot_turn_the_text_around_it(page: Page) -> None:
    swarm = Imagined(4, 20)
    views, turned = swarm.peers, "isle\u202e-99"
    swarm.state.providers.peers = lambda: [
        replace(view, agrees=False, name=turned) if index == 2 else view
        for index, view in enumerate(views())
    ]
    swarm.log.emit(Rejected(peer=swarm.ids[1], reason="malformed", detail=turned))
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        whole = await page.evaluate("document.documentElement.outerHTML")
        assert "split: isle-99 has" in await page.evaluate(text("#alarms"))
        assert "isle-99" in await page.evaluate(text("#log"))
        assert "\u202e" not in whole


async def test_fragments_have_a_panel_where_there_are_some(page: Page) -> None:
    swarm = Imagined(4, 20)
    shown = "!document.querySelector('#fragments').hidden"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        assert not await page.evaluate(shown)  # merged as a whole
        done = swarm.state.rounds.newest[-1][1]
        for number in range(3):
            swarm.log.emit(
                replace(
                    done, round=20 - number, fragment=number, fragments=3, state=f"{number}a" * 9
                )
            )
        await page.until(shown)
        rows = await page.evaluate(
            "[...document.querySelectorAll('#fragments tbody tr')].map(r => r.textContent)"
        )
        assert [row[:6] for row in rows] == ["1 of 3", "2 of 3", "3 of 3"]
        assert "20" in rows[0]
        assert "18 (2 behind)" in rows[2]
        assert "2a2a2a2a2a2a" in rows[2]
        await page.until(f"{ROUNDS}.length > 3")
        assert (await page.evaluate(ROUNDS))[:3] == ["18 · 3/3", "19 · 2/3", "20 · 1/3"]
        for number, round_ in enumerate((20, 19, 18)):  # again, as after a replay: nothing is lost
            swarm.log.emit(replace(done, round=round_ + 1, fragment=number, fragments=3))
        await page.until(f"{ROUNDS}[0] === '19 · 3/3'")
        assert (await page.evaluate(ROUNDS))[:4] == ["19 · 3/3", "20 · 2/3", "21 · 1/3", "18 · 3/3"]
        await page.evaluate("document.querySelectorAll('#rounds tbody button')[2].click()")
        assert "round 21 · 1/3" in await page.evaluate(text("#waits-title"))
        swarm.log.emit(replace(done, round=22, members=0, dropped={}))
        await page.until(f"{ROUNDS}[0] === '22'")
        assert f"lets in {done.live}" in await page.evaluate(text("#rounds tbody tr"))
        picked = "document.querySelectorAll('#rounds tr.picked').length"
        assert await page.evaluate(picked) == 1
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_islands_that_meet_in_pairs_are_not_said_to_stand_elsewhere(page: Page) -> None:
    """Nobody's state can be another's: no round differs by that, and no number is null."""
    swarm = Imagined(3, 0)
    views = swarm.peers
    swarm.state.providers.peers = lambda: [replace(view, agrees=None) for view in views()]
    agrees = "[...document.querySelectorAll('.peers td.agrees')].map(e => e.textContent)"
    same = "[...document.querySelectorAll('#fragments tbody tr')].map(r => r.cells[6].textContent)"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        assert await page.evaluate(agrees) == ["\u2013"] * 3
        for number in range(3):
            swarm.log.emit(RoundDone(round=4, fragment=number, fragments=3, live=3, agreeing=None))
        await page.until("!document.querySelector('#fragments').hidden")
        assert await page.evaluate(same) == ["\u2013"] * 3
        assert await page.evaluate(agrees) == ["\u2013"] * 3
    assert [error for error in page.errors if "ERR_" not in error] == []


LINKS = (
    "[...document.querySelectorAll('#links tbody tr')]"
    ".map(r => [...r.querySelectorAll('td')].map(c => [c.title, c.textContent]))"
)


async def test_links_between_two_others_show_what_they_tell_or_both_publish(page: Page) -> None:
    swarm = Imagined(4, 20)
    _, second, _, fourth = swarm.ids
    told = [LinkView(second, fourth, 3e6, 0.25, 9.0), LinkView(fourth, second, None, 0.25, 9.0)]
    swarm.state.providers.all_links = lambda: KnownLinks([*swarm.links(), *told])
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        await page.until(f"({LINKS})[0][1][0] === 'measured here'")
        rows = await page.evaluate(LINKS)
        assert rows[1][3] == ["measured there, told 9 s ago", "3.00 MB/s0.3 s"]
        assert rows[3][1] == ["at most, as announced", "23.0 MB/s0.3 s"]
        # of this one nobody has told: what both ends announce of all their links
        assert rows[1][2] == ["at most, as announced", "21.0 MB/s≈ 35 ms"]
        # who stands in it with the keyboard stays there while it is updated
        await page.evaluate("document.querySelector('#links .scroll').focus()")
        updates = await page.evaluate(UPDATES)
        swarm.step()
        await page.until(f"{UPDATES} > {updates} + 1")
        assert await page.evaluate("document.activeElement.className") == "scroll"


async def test_joining_is_shown_while_it_lasts(page: Page) -> None:
    swarm = Imagined(3, 0)
    swarm.state.status = "joining"
    swarm.log.emit(JoinProgress(step=5, name="sync", text="12%, 1.2 of 10.4 GB, 7m left"))
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        assert "5/6 sync" in await page.evaluate(text("#joining"))
        assert "7m left" in await page.evaluate(text("#joining"))
        assert await page.evaluate("document.querySelector('#steps').hidden")
        swarm.state.status = "active"
        swarm.step()
        await page.until("document.querySelector('#joining').hidden")
        await page.until("!document.querySelector('#steps').hidden")


async def test_a_page_that_was_open_before_the_run_was_known_has_what_is_of_the_run(
    page: Page,
) -> None:
    """As that of a seed that waits for one: what it shows must not wait for a reload."""
    swarm = Imagined(3, 20)
    run = swarm.state.run
    assert run is not None
    swarm.state.run = None
    manifest = {"script": {"layout": "ab"}, "outer": {"lr": 0.7}}
    join = "#node .join code"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        assert (await page.evaluate(text(join))).startswith("node start --peers ")
        assert "outer" not in await page.evaluate(text("#node .facts"))
        swarm.state.run = replace(run, manifest=manifest)
        await page.until(f"{text(join)}.startsWith('node.join(model')")
        await page.until(f"{text('#node .facts')}.includes('0.7 outer')")
        updates = await page.evaluate(UPDATES)
        await page.until(f"{UPDATES} > {updates}")
        assert (await page.evaluate(text(join))).startswith("node.join(model")
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_a_join_line_that_few_can_use_says_so(page: Page) -> None:
    swarm, hint = Imagined(3, 10), "#node .join p"
    near = f"192.168.1.20:4390/{swarm.ids[0]}"
    swarm.state.node = replace(swarm.state.node, public_addr="", join_address=near)
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        told = await page.evaluate(text(hint))
        assert told.startswith("(in your own network only; for others forward port 4390 and ")
        swarm.state.node = replace(swarm.state.node, public_addr="192.168.1.20:4390")
        await page.until(f"{text(hint)} === ''")
    assert page.errors == []


async def test_a_locked_dashboard_is_opened_by_the_key(page: Page) -> None:
    async with served(Imagined(3, 10), key=KEY) as url:
        await page.go(url)
        await page.until("!document.querySelector('#unlock').hidden")
        assert await page.evaluate("document.activeElement.id") == "key"
        unlock = "key.value = {!r}; document.querySelector('#unlock').requestSubmit()"
        await page.evaluate(unlock.format("x" * 20))
        await page.until(f"{text('#unlock-error')}.includes('does not take')")
        await page.evaluate(unlock.format(KEY))
        await page.until(f"{UPDATES} > 0")
        await page.evaluate("sessionStorage.clear()")
        await page.go("about:blank")
        await page.go(f"{url}#key={KEY}")
        await page.until(f"{UPDATES} > 0")
        assert KEY not in await page.evaluate("location.href"), "it does not stay in the address"


async def test_a_printed_address_opens_the_tab_that_asks_for_the_key(page: Page) -> None:
    key = "ab+cd&ef%41gh#ijklmn"
    printed = f"#key={quote(key, safe='')}"
    async with served(Imagined(3, 10), key=key) as url:
        await page.go(url)
        await page.until("!document.querySelector('#unlock').hidden")
        unlock = "key.value = {!r}; document.querySelector('#unlock').requestSubmit()"
        await page.evaluate(unlock.format("ab+cd…"))
        await page.until(f"{text('#unlock-error')}.includes('ASCII')")
        await page.send("Page.navigate", url=url + printed)  # loads nothing: another fragment only
        await page.until(f"{UPDATES} > 0 && document.querySelector('#unlock').hidden")
        assert "key" not in await page.evaluate("location.href")
        await page.evaluate("sessionStorage.clear()")
        await page.go("about:blank")
        await page.go(url)
        await page.until("!document.querySelector('#unlock').hidden")
        await page.evaluate(unlock.format(f" {url}{printed}"))
        await page.until(f"{UPDATES} > 0")


async def test_a_real_swarm(page: Page, tmp_path: Path) -> None:
    with nodes(tmp_path) as make:
        few = ("--set", "rounds.inner_steps=10", "--set", "rounds.total_rounds=500")
        first = make("first").start("start", "--name", "alps", *few)
        address = await asyncio.to_thread(first.address)
        for name in ("fjord", "mesa"):
            make(name).start("start", "--name", name, "--peers", address)
        await page.go(f"http://{first.events('started')[0]['api']}/")
        await page.until(f"{text('#peers')}.includes('mesa')", 120)
        await page.until(f"{ACTIVE} === 3", 120)
        before = await page.evaluate(text("#rounds tbody th"))
        await page.until(f"{text('#rounds tbody th')} !== {before!r}", 120)
        await page.until(f"{text('#agree, #consensus .agreement p')}.includes('of 3')", 120)
        await page.until(f"/before the merge 0\\.\\d/.test({text('#consensus .legend')})", 120)
        await page.until("document.querySelectorAll('.waits li').length >= 2", 120)
        for panel in PANELS:
            assert len(await page.evaluate(text(f"#{panel} .body"))) > 10, panel
    assert [error for error in page.errors if "ERR_" not in error] == []
