"""What a node reads of text and tokens: for a run that it makes, and to train on itself.

Reading may take minutes: it goes on beside the event loop, and how far it is is told now and then.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.config import NodeConfig
from node.entry.entrance import Run
from node.errors import operator_error
from node.headway import Headway, OnProgress, Tell
from node.monitor.event_log import EventLog
from node.monitor.events import Notice
from node.setting_values import RECIPE, own_text
from protocols.errors import reason
from protocols.files import replacing
from protocols.identity import Identity
from protocols.tasks import Offload

T = TypeVar("T")

NOTE = "tokens.json"  # of a state directory
_MAX_NOTE_BYTES = 64 * 1024


@dataclass(frozen=True)
class TokensNote:
    """What a node noted of the tokens that it trained on. Paths are any bytes, as JSON escapes."""

    run: str = ""  # its id: tokens of another may be others' text, or ids of another tokenizer
    tokens: str = ""  # where they are
    place: str = ""  # what they were made of; empty for the run's recipe

    @classmethod
    def read(cls, note: Path) -> TokensNote:
        """As noted, of whichever run. Raises OSError, and ValueError where it is damaged."""
        with note.open("rb") as file:
            data = file.read(_MAX_NOTE_BYTES)
        try:
            known = cls(**json.loads(data))
        except (TypeError, RecursionError) as error:
            raise ValueError("it is no note of tokens") from error
        if not all(isinstance(value, str) for value in asdict(known).values()):
            raise ValueError("what it says is no text")
        return known

    @classmethod
    def of(cls, note: Path, run: str) -> TokensNote:
        """As noted for this run, for who can do without: else with empty fields."""
        try:
            known = cls.read(note)
        except (OSError, ValueError):
            return cls()
        return known if known.run == run else cls()

    def write(self, note: Path) -> None:
        """Take the place of what was noted before."""
        with replacing(note) as file:
            file.write(json.dumps(asdict(self)).encode())


@dataclass
class Reading:
    """What is read at one node, with its settings."""

    config: NodeConfig
    identity: Identity
    events: EventLog
    offload: Offload
    # what :meth:`tokens` has made them of, for this island's other hosts; empty: the run's recipe
    place: str = field(default="", init=False)

    async def make_run(self, manifest: Manifest) -> Run:
        """Make a run of this manifest: cut its evaluation shard, name it in the manifest, sign.

        The path of this island's own text stays here: it means nothing to others. A run of
        scripts has no such shard. Raises OperatorError E204, E402, E601, E603 to E606.
        """
        if manifest.script.layout:
            return Run(SignedManifest.create(manifest, self.identity), b"", created=True)
        from node.data.supply import Given, make

        if self._own and manifest.data.recipe != "text":
            self._note(
                "the text of --data stays here: who joins without --data trains on "
                f"{manifest.data.recipe}; --set data.recipe=text has everybody bring text"
            )
        own = self._own or manifest.data.path
        if self.config.init_from and not own and manifest.data.recipe != "text":  # else E601
            self._note(
                "--init-from without --data: trains these weights on the recipe of the run, "
                f"{manifest.data.recipe} of Python packages; their own text, or other, is given "
                "with --data"
            )
        supply = await self._in_the_background(
            lambda progress, tell: make(
                manifest,
                self._own,
                Given(self.config.tokenizer, self.config.init_from),
                self._cache,
                progress,
                tell,
                int(self.config.data_cache),
            )
        )
        return Run(
            SignedManifest.create(supply.manifest, self.identity),
            supply.shard,
            created=True,
            tokens=supply.tokens,
            place=own,
            tokenizer=supply.tokenizer,
            init_from=self.config.init_from,
        )

    async def tokens(self, run: Run, *, trained: bool = False) -> str:
        """Where this island's training tokens are: a file, or a token folder here or at a URL.

        Remembered for this run, so that resuming needs no --data; ``trained``: it goes on with what
        it learnt of them, so that nothing may take their place. Nothing of the evaluation shard is
        in them; empty for a script, which has its own. Raises OperatorError E402, E601, E603, E604,
        E605.
        """
        if run.manifest.script.layout:
            return ""
        note, run_id = self.config.dir / NOTE, run.signed.run_id.hex()
        self.place = run.place if run.tokens else self._own
        tokens = run.tokens
        if not tokens and not self.config.data:
            known = _known(note, run_id, trained=trained)
            self.place = known.place  # also where its tokens are gone: nothing else in its stead
            tokens = await self._kept(run, known.tokens)
        tokens = tokens or await self._tokens_for(run, self.place)
        TokensNote(run_id, tokens, self.place).write(note)
        return tokens

    async def _kept(self, run: Run, kept: str) -> str:
        """What this node trained on before, where that is there and still fits the run."""
        from node.data.folder import is_folder
        from node.data.supply import usable

        if not await self._in_the_background(lambda progress, tell: usable(kept, tell)):
            return ""
        return await self._tokens_for(run, kept) if is_folder(kept) else kept  # checked anew

    async def _tokens_for(self, run: Run, place: str) -> str:
        from node.data.supply import tokens_for

        if not place and not self.config.data and run.manifest.data.recipe != "text":
            self._note(
                f"no --data: trains on the recipe of the run, {run.manifest.data.recipe} of Python "
                "packages on this machine; text of your own is given with --data"
            )
        return await self._in_the_background(
            lambda progress, tell: tokens_for(
                run.manifest, run.shard, run.tokenizer, place, progress, tell, self._cache
            )
        )

    async def _in_the_background(self, work: Callable[[OnProgress, Tell], T]) -> T:
        """Read beside the event loop; if this is cancelled, reading ends soon as well."""
        wanted, loop = True, asyncio.get_running_loop()
        headway = Headway(lambda text: self._note(f"reads text: {text}"), unit="files")

        def progress(done: int, total: int) -> None:
            if not wanted:
                raise asyncio.CancelledError
            loop.call_soon_threadsafe(headway, done, total)

        def tell(line: str) -> None:
            loop.call_soon_threadsafe(self._note, line)

        try:
            result: T = await self.offload(lambda: work(progress, tell))
        finally:
            wanted = False
        return result

    @property
    def _own(self) -> str:
        """This island's own text, as it is given; empty for the run's recipe."""
        return own_text(self.config.data)

    @property
    def _cache(self) -> Path:
        return self.config.dir / "data-cache"

    def _note(self, text: str) -> None:
        self.events.emit(Notice(text=text))


def _known(note: Path, run: str, *, trained: bool) -> TokensNote:
    """What is noted of this run's tokens. Raises E601 where there was a note and it is lost."""
    try:
        known = TokensNote.read(note)
        if known.run == run:
            return known
        lost = "is of another run" if trained else ""
    except FileNotFoundError:
        lost = "is missing" if trained else ""
    except OSError as error:
        lost = f"cannot be read ({reason(error)})"
    except ValueError:
        lost = "is damaged"
    if lost:  # the recipe in its stead would go into the run's model, and be noted for good
        raise operator_error(
            "E601",
            "what this island trained on is not known any more",
            why=f"{note}, which names it, {lost}",
            fix="give that text again with --data; if it was the recipe of the run, "
            f"--data {RECIPE}",
        )
    return TokensNote()
