"""The dashboard with the keyboard alone, by a screen reader, in all sizes and colours."""

from __future__ import annotations

from dataclasses import replace

import pytest
from browser_kit import FILLED, IN_A_BROWSER, Page, served, text
from dashboard_kit import Imagined

pytestmark = IN_A_BROWSER
OVERFLOWING = (
    "[...document.querySelectorAll('.stats .value, .stats .note')]"
    ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"
)
FOCUSED = """(() => {
  const e = document.activeElement;
  const box = e.closest('section[id],nav,header,fieldset');
  const outline = getComputedStyle(e).outlineStyle;
  const radio = e.type === 'radio';
  return [e.tagName, e.className || e.id, box?.id || box?.tagName || '', outline, radio];
})()"""
BROKEN = (
    "[...all('[aria-labelledby]')]"
    ".filter(e => !document.getElementById(e.getAttribute('aria-labelledby')))",
    "[...all('table')].filter(e => !e.caption)",
    "[...all('button')].filter(e => !e.textContent.trim())",
    "[...all('canvas.matrix, [role=img]')].filter(e => !e.getAttribute('aria-label'))",
    "[...all('[id]')].filter((e, i, found) => found.findIndex(o => o.id === e.id) !== i)",
)
# contrast as in WCAG 2.2, 1.4.3, of the colours that text and its background have
CONTRAST = """(() => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    pen.fillStyle = style.getPropertyValue(name).trim();
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...pen.getImageData(0, 0, 1, 1).data]
      .map((v) => v / 255)
      .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const pairs = [['--ink', '--card'], ['--quiet', '--card'], ['--quiet', '--page'],
    ['--ink', '--warn-page'], ['--bad-ink', '--bad-page'], ['--good-ink', '--card'],
    ['--bad-ink', '--card']];
  return pairs.map(([ink, paper]) => {
    const [low, high] = [light(ink), light(paper)].sort((a, b) => a - b);
    return [ink, paper, (high + 0.05) / (low + 0.05)];
  });
})()"""


async def test_the_keyboard_reaches_everything_in_order(page: Page) -> None:
    async with served(Imagined(12, 30)) as url:
        await page.go(url)
        await page.until(FILLED)
        order = []
        for _ in range(100):
            await page.press("Tab")
            where = await page.evaluate(FOCUSED)
            order.append(where)
            if where[2] == "log":
                break
        places = list(dict.fromkeys(where[2] for where in order if where[2]))
        assert order[0][1] == "skip"
        expected = [
            "NAV",
            "HEADER",
            "range",
            "loss",
            "consensus",
            "rounds",
            "time",
            "steps",
            "peers",
            "links",
            "node",
            "log",
        ]
        assert [place for place in places if place in expected] == expected
        seen = [where for where in order if not where[4] and where[0] != "BODY"]
        assert all(where[3] != "none" for where in seen), "every stop shows its focus"


async def test_a_chart_is_read_with_arrow_keys_and_as_a_table(page: Page) -> None:
    async with served(Imagined(3, 30)) as url:
        await page.go(url)
        await page.until(FILLED)
        await page.evaluate("document.querySelector('#loss .plot').focus()")
        assert "Round 29" in await page.evaluate(text("#loss .legend"))
        await page.press("ArrowLeft")
        await page.press("ArrowLeft")
        assert "Round 27" in await page.evaluate(text("#loss [aria-live]"))
        label = await page.evaluate(
            "document.querySelector('#loss .plot').getAttribute('aria-label')"
        )
        assert "Validation loss" in label
        await page.evaluate("document.querySelector('#loss summary').click()")
        await page.until("document.querySelectorAll('#loss details tbody tr').length === 20")
        await page.evaluate("document.querySelectorAll('#rounds tbody button')[3].click()")
        assert "round 26" in await page.evaluate(text("#waits-title"))
        await page.evaluate("document.querySelectorAll('.peers thead button')[1].click()")
        sort = "document.querySelectorAll('.peers thead th')[1].ariaSort"
        assert await page.evaluate(sort) == "ascending"


async def test_sorted_by_clocks_those_that_are_not_known_come_last(page: Page) -> None:
    swarm = Imagined(3, 10)
    offsets, views = (None, 3.0, -0.5), swarm.peers
    swarm.state.providers.peers = lambda: [
        replace(view, clock_offset_s=offset) for view, offset in zip(views(), offsets, strict=True)
    ]
    clocks = "[...document.querySelectorAll('.peers .clock_offset_s')].map(e => e.textContent)"
    async with served(swarm) as url:
        await page.go(url)
        await page.until(FILLED)
        await page.evaluate("document.querySelector('[data-key=clock_offset_s] button').click()")
        assert [clock[1:5] for clock in await page.evaluate(clocks)] == ["0.50", "3.00", ""]


async def test_names_roles_and_headings(page: Page) -> None:
    async with served(Imagined(3, 30)) as url:
        await page.go(url)
        await page.until(FILLED)
        assert await page.evaluate("document.querySelectorAll('h1').length") == 1
        for tag in ("header", "main", "nav", "footer"):
            assert await page.evaluate(f"document.querySelectorAll('body {tag}').length") == 1, tag
        for broken in BROKEN:
            found = f"(all => {broken}.length)(s => document.querySelectorAll(s))"
            assert await page.evaluate(found) == 0, broken


@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1440, True), (820, False)])
async def test_it_fits_and_can_be_read(page: Page, width: int, dark: bool) -> None:
    await page.shape(width, 844, dark=dark)
    swarm, long = Imagined(9, 30), "W" * 64  # as long as a name may be, and without a blank
    views = swarm.peers
    swarm.state.providers.peers = lambda: [
        replace(view, name=long, region=long, agrees=not index) if index < 2 else view
        for index, view in enumerate(views())
    ]
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{FILLED} && {text('#links')}.includes('Slowest to send')")
        for panel in ("#alarms", "#loss", "#waits", "#peers"):
            assert long in await page.evaluate(text(panel)), panel
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(OVERFLOWING) == [], "figures stay in their boxes"
        for ink, paper, ratio in await page.evaluate(CONTRAST):
            assert ratio >= 4.5, (ink, paper, ratio)
