"""The monitor on the terminal: panels that are drawn anew from each picture."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import DataTable, Footer, RichLog, Static

from node.monitor.console import render
from node.monitor.reading import read_record
from node.monitor.terminal import drawing
from node.monitor.terminal.drawing import there
from node.monitor.terminal.source import AttachedSource, Picture, Source
from node.status import OTHER_FORM, other_version
from protocols.errors import OperatorError

CHART_ROWS = 6
_KEPT_LINES = 500
_SHOWN_ROWS = 256  # of a table


class Monitor(App[int]):
    """Shows what ``source`` gives; ends with exit status 0, or with the error in ``failure``."""

    TITLE = "Atoll"
    ENABLE_COMMAND_PALETTE = False
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-tall")]  # noqa: RUF012 - as textual declares it
    CSS = """
    #header { height: 2; padding: 0 1; background: $panel; }
    #alarms { height: auto; max-height: 6; padding: 0 1; }
    .row { height: 9; }
    #header, .row Static { text-wrap: nowrap; text-overflow: ellipsis; }
    .row Static { width: 1fr; height: 100%; padding: 0 1; border: round $primary-darken-2; }
    #peers { height: 1fr; min-height: 5; border-top: solid $primary-darken-2; }
    .-low #charts { display: none; }
    .-low #events { height: 3; }
    #events { height: 7; border-top: solid $primary-darken-2; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q,ctrl+c", "quit", "Quit"),
        ("p", "pause", "Pause"),
        ("s", "sort", "Sort"),
        ("v", "view", "Islands/links/fragments"),
    ]
    VIEWS = ("islands", "links", "fragments")
    SORTS: ClassVar[tuple[tuple[str, Any], ...]] = (
        ("merged tokens", lambda peer: -peer["merged_tokens"]),
        ("loss", lambda peer: 1e9 if peer["loss"] is None or not there(peer) else peer["loss"]),
        ("speed", lambda peer: -peer["tokens_per_second"] if there(peer) else 0.0),
        ("name", lambda peer: (peer["name"], peer["peer"])),
    )
    BY_CLAIMED: ClassVar[tuple[str, Any]] = (  # in place of the first, where no more is known
        "claimed tokens",
        lambda peer: -peer["total_tokens"],
    )

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.source = source
        self.failure: OperatorError | None = None
        self.shown = 0  # pictures
        self.paused = False
        self._sorted = 0
        self._view = 0  # of VIEWS, in the table
        self._heads: tuple[str, ...] = ()  # that the table has
        self._picture: Picture | None = None  # on the screen
        self._newer: Picture | None = None
        self._newest = 0  # event that was told, of the process
        self._instance = ""

    def compose(self) -> ComposeResult:
        """The panels, from top to bottom."""
        yield Static("connecting …", id="header")
        yield Static(id="alarms")
        with Horizontal(classes="row", id="charts"):
            yield Static(id="loss")
            yield Static(id="consensus")
        with Horizontal(classes="row"):
            yield Static(id="rounds")
            yield Static(id="node")
        yield DataTable(id="peers", cursor_type="row", zebra_stripes=True)
        yield RichLog(id="events", max_lines=_KEPT_LINES, wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read the source."""
        self.run_worker(self._follow(), exclusive=True)

    async def _follow(self) -> None:
        try:
            async with aclosing(self.source.pictures()) as pictures:
                async for picture in pictures:
                    self._newer = picture
                    if not self.is_running:  # it is being closed: there is nothing to draw on
                        return
                    if not self.paused:
                        self._picture = picture
                        self.draw(picture)
        except OperatorError as error:
            self._fail(error)

    def action_pause(self) -> None:
        """Hold the picture, and let it go on."""
        self.paused = not self.paused
        self._picture = self._picture if self.paused else self._newer
        self._again()

    def action_sort(self) -> None:
        """Sort the islands by the next column."""
        self._sorted = (self._sorted + 1) % len(self.SORTS)
        self._again()

    def action_view(self) -> None:
        """Show another table: islands, links between them, fragments."""
        self._view = (self._view + 1) % len(self.VIEWS)
        self._again()

    def on_resize(self) -> None:
        """Charts are as wide as there is room."""
        self.call_after_refresh(self._again)

    def _again(self) -> None:
        if self._picture is not None:
            self.draw(self._picture)

    def draw(self, picture: Picture) -> None:
        """Put a picture on all panels; one of a node of another version may end the monitor."""
        try:
            self._draw(picture)
        except OTHER_FORM as error:
            if not isinstance(self.source, AttachedSource):
                raise  # it was made here
            self._fail(other_version(picture.get("state"), error))

    def _fail(self, error: OperatorError) -> None:
        self.failure = error
        self.exit(return_code=error.exit_code)

    def _draw(self, picture: Picture) -> None:
        state, columns = picture["state"], picture["history"]["columns"]
        paused = "  (paused)" if self.paused else ""
        self._put("header", drawing.header(picture, self.source.title + paused))
        alarms = drawing.alarms(state)
        self.query_one("#alarms", Static).display = bool(alarms)
        self._put("alarms", alarms)
        last = state["training"]["validation_loss"]
        self._put("loss", drawing.loss(columns, self._room("loss"), CHART_ROWS, last))
        apart = drawing.curve(
            "consensus, before merges",
            columns["consensus"],
            self._room("consensus"),
            CHART_ROWS,
        )
        self._put("consensus", apart)
        rounds = drawing.rounds(picture["rounds"], self._room("rounds"), drawing.names(state))
        self._put("rounds", rounds)
        self._put("node", drawing.node(state))
        self._fill_table(picture)
        self._tell(state["instance"], picture["events"])
        self.shown += 1

    def _fill_table(self, picture: Picture) -> None:
        table = self.query_one("#peers", DataTable)
        row, top = table.cursor_row, table.scroll_y
        title, columns, rows = self._chosen(picture)
        other = columns != self._heads
        table.clear(columns=other)
        if other:
            table.add_columns(*columns)
            self._heads, row, top = columns, 0, 0
        shown, known = min(len(rows), _SHOWN_ROWS), len(rows)
        if self.VIEWS[self._view] == "links":
            known += (picture.get("links") or {}).get("left_out", 0)
        table.border_title = title + (f", {shown:,} of {known:,}" if shown < known else "")
        for cells in rows[:_SHOWN_ROWS]:
            table.add_row(*map(Text, cells))
        table.move_cursor(row=row)
        table.scroll_to(y=top, animate=False)  # the cursor moves only where a key moves it

    def _chosen(self, picture: Picture) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
        """Title, columns and rows of what is chosen."""
        view = self.VIEWS[self._view]
        if view == "links":
            return "links, the slowest first", drawing.LINK_COLUMNS, drawing.link_rows(picture)
        if view == "fragments":
            return "fragments", drawing.FRAGMENT_COLUMNS, drawing.fragment_rows(picture["state"])
        claimed = drawing.only_claimed(picture["state"])
        name, key = self.BY_CLAIMED if claimed and not self._sorted else self.SORTS[self._sorted]
        peers = sorted(picture["state"]["peers"], key=key)
        rows = [drawing.peer_row(peer, claimed=claimed) for peer in peers]
        return f"islands by {name}", drawing.peer_columns(claimed), rows

    def _put(self, name: str, text: Text) -> None:
        self.query_one(f"#{name}", Static).update(text)

    def _room(self, name: str) -> int:
        return max(10, self.query_one(f"#{name}", Static).content_size.width)

    def _tell(self, instance: str, events: list[dict[str, Any]]) -> None:
        if instance != self._instance:  # the node was started anew, and numbers from 1
            self._instance, self._newest = instance, 0
        log = self.query_one("#events", RichLog)
        for values in events:
            if values["seq"] <= self._newest:
                continue
            self._newest = values["seq"]
            record = read_record(values)
            if record is not None and (line := render(record.event)):
                log.write(Text(line.strip()))
