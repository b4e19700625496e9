"""``node start`` on a host of an island that is not host 0: trainer ranks and nothing else.

It has no identity, no open port and no part in the swarm. It asks host 0 for the run, makes or
opens the training tokens, starts ranks when it is told to, and kills them when host 0 is gone; then
it looks for host 0 for as long as it was given. Told to stop, it asks host 0 to let it go: where
all hosts are stopped at once, host 0 needs the ranks for its last checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from node import __version__, clock, directories
from node.clock import Waited
from node.config import NodeConfig
from node.errors import operator_error
from node.hosts.interface import met_at, untold
from node.hosts.meeting import Meeting
from node.hosts.preparing import prepare
from node.hosts.wire import (
    GREETING_S,
    Challenge,
    Farewell,
    Halt,
    Hello,
    HostConnection,
    HostLostError,
    Job,
    Launch,
    Leaving,
    Prepared,
    RankEnded,
    Welcome,
    Word,
    farewell,
    fitting,
    nonce,
    proof,
    proven,
    signed,
)
from node.interrupts import EXIT_INTERRUPTED, catch
from node.island.cores import threads_of
from node.island.hardware import hardware
from node.island.rank_process import PASSING, RankProcess, oom_kills, rank_environment
from node.monitor.console import AT_ONCE_S, Console
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Stopping
from node.outermost import first_known
from node.setting_values import own_text
from node.statedir import HOST, StateDir
from node.trainer.settings import EXIT_OUT_OF_MEMORY, TrainerSettings
from protocols.addresses import hostport
from protocols.connections.names import NEXT_ADDRESS_S
from protocols.errors import OperatorError, reason
from protocols.tasks import first

MAX_WORDS = 32  # messages of host 0 that may wait while tokens are made
RETRY_S = 1.0  # between tries to reach host 0
TELL_S = 15.0  # between lines that tell of these tries
DIAL_S = 10.0
LOOK_S = 2 * (DIAL_S + GREETING_S)  # that a try may take at most: longer, and it stood still
START_TRIES, START_PAUSE_S = 4, 5.0  # of a rank


def run(config: NodeConfig, meeting: Meeting) -> int:
    """Serve host 0 until it says farewell or is lost for good; the process's exit status."""
    return asyncio.run(Helper(config, meeting).main())


class Helper:
    """One host beside host 0."""

    def __init__(self, config: NodeConfig, meeting: Meeting) -> None:
        self.config, self.meeting = config, meeting
        # a folder of its own: hosts may share one disk, and the directory with it
        self.home = StateDir(config.dir / f"{HOST}{meeting.host}")
        self.tokens = ""  # where they are
        self.device, self.ranks = hardware(config, meeting.maximum)
        self._process = nonce()
        self._running: list[RankProcess] = []
        self._life = -1
        self._waiting: asyncio.TaskGroup
        self._asked = False  # to stop
        self._stopped: asyncio.Event
        self._host_0: HostConnection
        self.events: EventLog
        self._console: Console

    async def main(self) -> int:
        """Until the end; raises OperatorError E409, E410, or what host 0 says."""
        self.home.lock(self.meeting.host)
        directories.note(self.home.root)
        with ExitStack() as stack:
            stack.callback(self.home.unlock)
            stack.enter_context(self.home.logging())
            events = EventLog(self.home.events, clock=clock.wall)
            stack.callback(events.close)
            self._console = Console(sys.stdout, as_json=self.config.json_log)
            events.subscribe(self._console)
            stack.callback(self._console.finish)
            self.events = events
            self._stopped = asyncio.Event()
            catch(asyncio.get_running_loop(), self._stop)
            await first(self._serve(), self._stopped.wait())
        return 0

    def _stop(self, name: str) -> None:
        """Once: leave; where ranks run, when host 0 can do without them. Twice: end at once.

        The ranks die with this process. SIGHUP of a terminal that is closed comes twice, and counts
        once.
        """
        if self._asked and name == "SIGHUP":
            return
        if self._asked:  # a thread may be reading text, or a disk may hang
            self._console.finish(AT_ONCE_S)
            os._exit(EXIT_INTERRUPTED)
        self._asked = True
        self.events.emit(Stopping(reason=name))
        if any(rank.running for rank in self._running):
            self._host_0.send(Leaving())
            self.say("its ranks run until host 0 has left as well, or goes on without them")
        else:
            self._stopped.set()

    async def _serve(self) -> None:
        """Follow host 0, and look for it again when it is lost."""
        why = ""
        while True:
            self._host_0 = connection = await self._find(why)
            try:
                if await self._follow(connection):
                    return
            except HostLostError as error:
                why = str(error)
                self.say(f"host 0 of this island is lost: {why}; this host's ranks are stopped")
            finally:
                connection.close()
            if self._asked:
                return
            await asyncio.sleep(RETRY_S)

    # --- coming to host 0 ---------------------------------------------------------------------

    async def _find(self, why: str) -> HostConnection:
        """A greeted connection to host 0; raises E409 when none comes about in time."""
        waited = Waited(LOOK_S, asyncio.get_running_loop().time)
        meeting = self.meeting
        end, told_at = waited() + meeting.wait_s, -TELL_S
        where = hostport(meeting.address, meeting.port)
        while True:
            try:
                return await self._dial()
            except (OSError, TimeoutError, HostLostError) as error:
                why = why or str(error) or "no answer in time"
            left = end - waited()
            if left <= 0:
                raise operator_error(
                    "E409",
                    f"host 0 of this island is not there: given up after {meeting.wait_s:.0f} s",
                    why=f"{where}: {why}",
                    fix="start host 0 with the same --rdzv-endpoint, or see its log",
                )
            if waited() - told_at >= TELL_S:
                self.say(f"looking for host 0 of this island at {where}; {left:.0f} s left")
                told_at = waited()
            why = ""
            await asyncio.sleep(min(RETRY_S, left))

    async def _dial(self) -> HostConnection:
        meeting = self.meeting
        async with asyncio.timeout(DIAL_S):
            reader, writer = await asyncio.open_connection(
                meeting.address, meeting.port, happy_eyeballs_delay=NEXT_ADDRESS_S
            )
        connection = HostConnection(reader, writer)
        try:
            async with asyncio.timeout(GREETING_S):
                await self._greet(connection)
        except BaseException:  # also cancellation: no connection is left half-open
            connection.close()
            raise
        return connection

    async def _greet(self, connection: HostConnection) -> None:
        meeting, mine = self.meeting, nonce()
        challenge = await connection.receive()
        if not isinstance(challenge, Challenge):
            raise HostLostError("what answers there is no host of an island")
        whole = signed(challenge.nonce, mine, meeting.host)
        connection.send(
            Hello(
                __version__,
                meeting.host,
                socket.gethostname()[:64],
                self.ranks,
                self.device,
                mine,
                proof(meeting.key, b"hello", *whole),
                self._process,
            )
        )
        answer = await connection.receive()
        if isinstance(answer, Farewell):
            raise OperatorError(answer.code or "E410", answer.what, answer.why, answer.fix)
        if not isinstance(answer, Welcome) or not proven(
            meeting.key, answer.proof, b"welcome", *whole
        ):
            raise operator_error("E410", "host 0 does not know the rendezvous id")
        connection.admit()

    # --- following it -------------------------------------------------------------------------

    async def _follow(self, connection: HostConnection) -> bool:
        """Do what host 0 says; true at its farewell. Raises HostLostError, OperatorError."""
        self.say(f"host {self.meeting.host} of an island: {self.ranks} ranks, host 0 is there")
        over: bool | None = False
        failed: Exception | None = None
        last = Farewell("", f"host {self.meeting.host} was stopped")
        try:
            async with asyncio.TaskGroup() as self._waiting:
                words: asyncio.Queue[Word] = asyncio.Queue(MAX_WORDS)
                try:
                    over = await first(
                        self._listen(connection, words),
                        self._obey(words, connection),
                        connection.watch(),
                    )
                except Exception as error:  # noqa: BLE001 - raised below: a group would wrap it
                    failed = error
                    if isinstance(error, HostLostError) and not connection.lost:
                        # where host 0 only stands still it hears this first, and blames no rank
                        last = Farewell("", f"it has given host 0 up: {error}")
                        connection.send(last)
                finally:
                    self._kill()
            if failed is not None:
                raise failed
            return bool(over)
        except HostLostError:
            raise
        except Exception as error:  # host 0 is told, whatever ends this host
            last = farewell(first_known(error, (f"--dir={self.config.dir}",)))
            raise
        finally:
            self._kill()
            if not connection.lost:
                connection.send(last)
                await connection.flush(RETRY_S)

    async def _listen(self, connection: HostConnection, words: asyncio.Queue[Word]) -> bool:
        """Take in what host 0 says, also while tokens are made: or it would count as silent."""
        while True:
            word = await connection.receive()
            if not isinstance(word, Farewell):
                if words.full():
                    raise HostLostError("it says more than can be done")
                words.put_nowait(word)
                continue
            if word.code:
                raise OperatorError(word.code, f"host 0: {word.what}", word.why, word.fix)
            self.say(word.what)
            return True

    async def _obey(self, words: asyncio.Queue[Word], connection: HostConnection) -> bool:
        while True:
            match await words.get():
                case Job() as job:
                    await self._prepare(job)
                    connection.send(Prepared())
                case Launch() as launch:
                    await self._launch(launch, connection)
                case Halt() as halt:
                    if halt.life == self._life:
                        self._kill()
                case word:
                    raise HostLostError(f"it sent a {type(word).__name__}")

    async def _prepare(self, job: Job) -> None:
        """Make or open this host's tokens, the same as host 0's."""
        home = self.home.root
        (home / "evaluation.bin").write_bytes(job.shard)
        own = own_text(self.config.data)
        self.tokens = await prepare(job, own, home, self._cache, self.say)

    @property
    def _cache(self) -> Path:
        return self.home.root / "data-cache"

    async def _launch(self, launch: Launch, connection: HostConnection) -> None:
        """Start this host's ranks; their ends are told to host 0."""
        self._kill()
        self._life, self._running = launch.life, []
        threads = threads_of(self.config.threads, launch.count)
        settings = TrainerSettings.model_validate_json(launch.settings).model_copy(
            update={
                "tokens": self.tokens,
                "cache": self._cache,
                "cache_bytes": int(self.config.data_cache),
                "evaluation": self.home.root / "evaluation.bin",
                "threads": threads,
            }
        )
        file = settings.write(self.home.logs)
        address = met_at(connection.own_address, launch.store)
        environment = rank_environment(threads, address)
        if launch.count and (text := untold(address, os.environ)):
            self.say(text)
        kills = oom_kills()
        for place in range(launch.count):
            arguments = ["--settings", str(file), "--store", launch.store]
            arguments += ["--place", str(place)]
            rank = await self._spawn(launch.first + place, arguments, environment)
            self._running.append(rank)
            self._waiting.create_task(self._tell_end(rank, launch.life, kills, connection))
        if launch.count:
            self.say(f"{launch.count} of {settings.ranks} ranks are started here")
        else:
            self.say("the layout needs none of this host's ranks")

    async def _spawn(
        self, number: int, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> RankProcess:
        """Start a rank; again after a pause where memory or files are short for the moment.

        The other ranks, which wait for it where all of them meet, notice nothing.
        """
        left = START_TRIES
        while True:
            left -= 1
            try:
                return await RankProcess.spawn(number, self.home.logs, arguments, environment)
            except OSError as error:
                if not left or error.errno not in PASSING:
                    raise
                why = reason(error)
            self.say(f"rank {number} does not start: {why}; again in {START_PAUSE_S:.0f} s")
            await asyncio.sleep(START_PAUSE_S)

    async def _tell_end(
        self, rank: RankProcess, life: int, kills: int, connection: HostConnection
    ) -> None:
        status = await rank.wait()
        if status == -signal.SIGKILL and oom_kills() > kills:
            status = EXIT_OUT_OF_MEMORY
        number, status = (-status, 0) if status < 0 else (0, status)
        connection.send(
            RankEnded(life, rank.number, status, number, str(rank.log), fitting(rank.tail()))
        )

    def say(self, text: str) -> None:
        """A line for the operator."""
        self.events.emit(Notice(text=text))

    def _kill(self) -> None:
        for rank in self._running:
            rank.signal(signal.SIGKILL)
