"""The dashboard in a browser, of a swarm with more islands than it has rows, and of others."""

from __future__ import annotations

from dataclasses import replace

from browser_kit import IN_A_BROWSER, UPDATES, Page, served, text
from dashboard_kit import Imagined

pytestmark = IN_A_BROWSER
DRAWN = """(() => {
  window.drawn = {fillRect: 0, drawImage: 0};
  for (const name of Object.keys(drawn)) {
    const was = CanvasRenderingContext2D.prototype[name];
    CanvasRenderingContext2D.prototype[name] = function (...given) {
      if (this.canvas.className === 'matrix' || !this.canvas.isConnected) drawn[name] += 1;
      return was.apply(this, given);
    };
  }
})()"""
MOVED = """(() => {
  const canvas = document.querySelector('canvas.matrix');
  const {left, top} = canvas.getBoundingClientRect();
  for (let i = 0; i < 5; i++)
    canvas.dispatchEvent(
      new PointerEvent('pointermove', {clientX: left + 9 + 50 * i, clientY: top + 9}));
  return document.querySelector('#links .words').textContent;
})()"""


async def test_of_hundreds_of_islands_those_to_look_at_are_shown(page: Page) -> None:
    swarm = Imagined(150, 10)
    views = swarm.peers
    swarm.history.totals[swarm.ids[0]] = swarm.history.totals[swarm.ids[148]] = 1  # the least
    swarm.state.providers.peers = lambda: [
        replace(view, agrees=False) if index == 148 else view for index, view in enumerate(views())
    ]
    rows = "[...document.querySelectorAll('.peers tbody .who')].map(e => e.textContent)"
    async with served(swarm) as url:
        await page.shape(360, 740)
        await page.go(url)
        await page.until(f"{UPDATES} > 0 && {text('#links')}.includes('more are known')")
        shown = await page.evaluate(rows)
        assert shown[:2] == ["isle-00", "isle-148"]
        assert set(shown[2:4]) == {"isle-07", "isle-11"}  # of which one joins and one is silent
        assert "and 86 more" in await page.evaluate(text("#peers"))
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        await page.evaluate(DRAWN)
        assert "→" in await page.evaluate(MOVED)
        assert await page.evaluate("drawn") == {"fillRect": 0, "drawImage": 5}
    assert [error for error in page.errors if "ERR_" not in error] == []


async def test_those_who_do_not_train_are_counted_by_what_they_do(page: Page) -> None:
    swarm = Imagined(6, 4)
    views, roles = swarm.peers, ("island", "server", "island", "seed", "seed", "what")
    swarm.state.providers.peers = lambda: [
        replace(view, role=role) for view, role in zip(views(), roles, strict=True)
    ]
    async with served(swarm) as url:
        await page.go(url)
        await page.until(f"{UPDATES} > 0")
        told = await page.evaluate(text("#peers-count"))
        assert told.split(" · ")[0] == "2 live of 2, 1 server, 2 seeds"
