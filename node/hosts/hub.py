"""Host 0's side of an island on several hosts: who is there, what they run, who is lost.

A :class:`Hub` listens at the rendezvous endpoint for as long as the node runs. Hosts come
(:mod:`node.hosts.gate` says which are let in), are told the run, and make their training tokens;
:meth:`Hub.muster` waits for them before ranks start. The ranks of another host
(:mod:`node.hosts.remote`) are supervised by :mod:`node.island.island`, beside those of this host. A
host that is lost ends its ranks with :data:`~node.hosts.remote.HOST_LOST`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

from node.clock import Waited
from node.errors import operator_error
from node.hosts.gate import Gate, Refusal
from node.hosts.listening import listen
from node.hosts.meeting import Meeting
from node.hosts.remote import HOST_LOST, Host, RemoteRank
from node.hosts.wire import (
    FAREWELL_S,
    Farewell,
    HostConnection,
    HostLostError,
    Job,
    Launch,
    Leaving,
    Prepared,
    RankEnded,
    farewell,
)
from protocols.addresses import hostport, is_loopback
from protocols.errors import OperatorError
from protocols.tasks import every

LAST_CALL_S = 30.0  # to wait for others once the minimum is there: when the island first starts,
RESTART_CALL_S = 3.0  # and when it starts again
TELL_S = 15.0  # between lines about who is missing
# between the word that another host was told to stop and the same to host 0, where all are: Slurm
# and Kubernetes tell each of them for itself
LEAVING_S = 10.0
MAX_LOSSES = 2  # of one host, after which others go on without it until the next round
# memory, disk, and the way to the data, which a host may lack for a while
PASSING = ("E401", "E402", "E601", "E603")


class Hub:
    """The other hosts of this node's island."""

    def __init__(
        self,
        meeting: Meeting,
        device: str,
        say: Callable[[str], None],
        leaving: Callable[[], bool] = lambda: False,
    ) -> None:
        """``leaving``: whether host 0 is about to end, with a last checkpoint of all ranks."""
        self.meeting, self.say, self.leaving = meeting, say, leaving
        self.hosts: dict[int, Host] = {}
        self._gate = Gate(meeting, device, self.hosts)
        self.lost: dict[int, str] = {}  # why, of those that are not there any more
        self._losses: Counter[int] = Counter()  # while they trained, since the last round
        self._failing = set[int]()  # whose ranks have ended by themselves since then
        self._refusing = set[int]()  # whose ranks refuse to train, until they connect anew
        # what a host said that it lacks, or was turned away for though it knows the rendezvous id
        self._refused: dict[int, OperatorError] = {}
        self._turned_away: dict[str, str] = {}  # why, by who they say they are
        self._job: Job | None = None
        self._used: frozenset[int] = frozenset()  # hosts that the present life was offered to
        self._trained: frozenset[int] = frozenset()  # hosts whose ranks have run in some life
        self._news = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._closing = False
        self._server: asyncio.Server | None = None
        self._farewell = Farewell("", "host 0 has stopped")

    # --- life ---------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen; raises OperatorError E303 where the port is taken."""
        where = self.meeting.address, self.meeting.port
        self._server = await listen(self._connected, *where, self.say)

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def say_why(self, error: OperatorError | None) -> None:
        """What the other hosts are told at the end; None: nothing went wrong."""
        if error is not None:
            self._farewell = farewell(error)

    async def aclose(self) -> None:
        """Say farewell and close; the other hosts end, too."""
        self._closing = True
        if self._server is not None:
            self._server.close()
        for host in self.hosts.values():
            host.connection.send(self._farewell)
        connections = [host.connection for host in self.hosts.values()]
        await asyncio.gather(*(connection.flush(FAREWELL_S) for connection in connections))
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    # --- who is there -------------------------------------------------------------------------

    def offer(self, job: Job) -> None:
        """Tell all hosts, also those that come later, what they need for their tokens."""
        self._job = job
        for host in self.hosts.values():
            host.connection.send(job)

    @property
    def ready(self) -> list[Host]:
        """Hosts that can train, by number; without those that were lost again and again.

        Or whose ranks were. Those count where there are not enough others.
        """
        return self._steady if self.enough else self._able

    @property
    def enough(self) -> bool:
        """Whether the island can do with the hosts that are there and were not lost repeatedly."""
        return 1 + len(self._steady) >= self.meeting.minimum

    @property
    def _steady(self) -> list[Host]:
        return [host for host in self._able if self._losses[host.number] < MAX_LOSSES]

    @property
    def _able(self) -> list[Host]:
        there = [host for _, host in sorted(self.hosts.items())]
        return [host for host in there if host.prepared and not host.leaving.is_set()]

    @property
    def _reading(self) -> bool:
        """Whether a host is there that has yet to make its tokens."""
        there = self.hosts.values()
        return any(not host.prepared and not host.leaving.is_set() for host in there)

    @property
    def grown(self) -> bool:
        """Whether a host can train that the present ranks were started without."""
        return any(host.number not in self._used for host in self.ready)

    async def muster(self, *, again: bool) -> list[Host]:
        """Wait for the other hosts: for all, or once the minimum is there only a while longer.

        At the first start also for those that are there and read their data, however long that
        takes: they would be taken in by a restart. ``again``: ranks have run before. Raises
        OperatorError E409 when too few come in time, or what a host lacks, where it cannot do
        without that host.
        """
        clock = Waited(2 * TELL_S, asyncio.get_running_loop().time)
        began = clock()
        enough_since: float | None = None
        told, last_told = "", began - TELL_S
        last_call = RESTART_CALL_S if again else LAST_CALL_S
        while True:
            now, ready = clock(), self.ready
            if len(ready) + 1 >= self.meeting.maximum:
                break
            if len(ready) + 1 < self.meeting.minimum:
                enough_since = None
                end = began + self.meeting.wait_s
                self._raise_if_hopeless(over=now >= end)
            else:
                enough_since = now if enough_since is None else enough_since
                end = enough_since + last_call
                if self._reading and not again:
                    end = max(end, began + self.meeting.wait_s)
                if now >= end:
                    break
            line = self._missing()
            if line != told or now - last_told >= TELL_S:
                self.say(f"{line}; {end - now:.0f} s left")
                told, last_told = line, now
            self._news.clear()
            try:
                async with asyncio.timeout(max(0.0, min(end - now, TELL_S))):
                    await self._news.wait()
            except TimeoutError:
                continue
        self._used = frozenset(host.number for host in ready)
        return ready

    def _raise_if_hopeless(self, *, over: bool) -> None:
        able = self.meeting.maximum - len(self._refused)
        if able < self.meeting.minimum:
            raise next(iter(self._refused.values()))
        if over:
            raise operator_error(
                "E409",
                f"{self._missing()}: given up after {self.meeting.wait_s:.0f} s",
                why=self._whys(),
            )

    def _missing(self) -> str:
        wanted = range(1, self.meeting.maximum)
        here = [host.number for host in self.ready]
        missing = [f"{n}{self._why_not(n)}" for n in wanted if n not in here]
        need = self.meeting.minimum
        return (
            f"hosts of this island: {len(here) + 1} of {self.meeting.maximum} are ready, "
            f"host {', '.join(missing)} is missing" + (f" (at least {need})" if need > 1 else "")
        )

    def _why_not(self, number: int) -> str:
        """Why a host that is there cannot train; empty for one that is not."""
        host = self.hosts.get(number)
        if host is None:
            return ""
        if host.leaving.is_set():
            return " (is leaving)"
        if not host.prepared:
            return " (reads its data)"
        why = "its ranks cannot go on" if number in self._failing else "it was lost again"
        return f" (waits for a round, as {why})"

    def _whys(self) -> str:
        whys = [f"host {number}: {why}" for number, why in sorted(self.lost.items())]
        whys += [f"{who} was turned away: {why}" for who, why in self._turned_away.items()]
        return "; ".join(whys) or "they did not connect to " + hostport(
            self.meeting.address, self.meeting.port
        )

    # --- ranks --------------------------------------------------------------------------------

    def launch(
        self, host: Host, life: int, settings: str, ranks: range, store: str
    ) -> list[RemoteRank]:
        """Have a host start ranks; it may be lost already, then they end at once."""
        started = [RemoteRank(number, host, life) for number in ranks]
        host.running = {rank.number: rank for rank in started}
        if self.hosts.get(host.number) is not host:
            self._end_ranks(host, "it was lost before its ranks were started")
        host.connection.send(Launch(life, settings.encode(), ranks.start, len(ranks), store))
        return started

    def met(self) -> None:
        """All ranks of the present life have come together: each of its hosts can run them."""
        self._trained |= self._used

    def failed(self, host: Host, *, refused: bool) -> bool:
        """A host is there, and its ranks were the first to end, or have ``refused`` to train.

        Returns whether the island goes on without it for now, as without one that is lost.
        """
        self._losses[host.number] += MAX_LOSSES if refused else 1
        self._failing.add(host.number)
        if refused:
            self._refusing.add(host.number)
        return self._losses[host.number] >= MAX_LOSSES and self.enough

    def merged(self) -> None:
        """A round has been merged: hosts that were lost before may train again.

        What ranks refuse does not pass by itself: each round would be stopped twice to try.
        """
        for number in self._losses.keys() - self._refusing:
            del self._losses[number]
        self._failing &= self._refusing

    def reached_at(self, hosts: Sequence[Host]) -> str:
        """This host's address as the others see it; loopback only where all are on its machine."""
        ends = [host.connection.own_address for host in hosts]
        return next((one for one in ends if not is_loopback(one)), ends[0])

    def _end_ranks(self, host: Host, why: str) -> None:
        for rank in host.running.values():
            rank.ended(HOST_LOST, "", why)

    # --- connections --------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection from its first byte to its end; owned by :meth:`aclose`."""
        connection = HostConnection(reader, writer)
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        host: Host | None = None
        try:
            match await self._gate.greet(connection):
                case Host() as host:
                    self._admit(host)
                    await self._follow(host)
                case Refusal() as refusal:
                    self._turn_away(refusal)
        except HostLostError as error:
            if host is not None:
                self._lose(host, str(error))
        except asyncio.CancelledError:
            if not self._closing:  # Python 3.11 calls a cancelled callback an error, and logs it
                raise
        finally:
            connection.close()
            self._connections.discard(task)

    def _turn_away(self, refusal: Refusal) -> None:
        """Tell of a host that was refused, once; the island may have to do without it."""
        number, error = refusal.number, refusal.error
        ours = 1 <= number < self.meeting.maximum
        who = f"host {number}" if ours else "a host of another number"
        why = f"{error.what} ({error.why})"
        if self._turned_away.get(who) != why:
            self._turned_away[who] = why
            self.say(f"{who} was turned away: {why}")
        if refusal.unfit and ours and number not in self.hosts:
            self._refused[number] = error
            self._news.set()

    def _admit(self, host: Host) -> None:
        before = self.hosts.get(host.number)
        if before is not None:  # it has connected once more: its earlier connection is lost
            self._lose(before, before.farewell or "it has connected anew")
            before.connection.close()
        if host.number in self._refusing:
            self._refusing.discard(host.number)
            del self._losses[host.number]
        self.hosts[host.number] = host
        self._refused.pop(host.number, None)
        self._turned_away.pop(f"host {host.number}", None)
        if self._job is not None:
            host.connection.send(self._job)
        self._news.set()

    def _lose(self, host: Host, why: str) -> None:
        if self.hosts.get(host.number) is host:
            del self.hosts[host.number]
            self.lost[host.number] = why
            self._losses[host.number] += host.number in self._used
            self._used -= {host.number}
            if not self._closing:
                self.say(f"{host.shown} of this island is lost: {why}")
        self._end_ranks(host, why)
        self._news.set()

    async def _follow(self, host: Host) -> None:
        """Take in what a host says until the connection is lost; raises HostLostError."""
        await every((host.connection.watch(), self._read(host), self._let_go(host)))

    async def _let_go(self, host: Host) -> None:
        """Once a host is leaving, go on without it; unless host 0 leaves as well.

        That needs the host's ranks for its last checkpoint, and says farewell afterwards.
        """
        await host.leaving.wait()
        await asyncio.sleep(LEAVING_S)
        if self.leaving():
            return
        why = "it was stopped"
        self._lose(host, why)
        host.connection.send(Farewell("", "host 0 goes on without this host"))
        await host.connection.flush(FAREWELL_S)
        raise HostLostError(why)

    async def _read(self, host: Host) -> None:
        while True:
            match await host.connection.receive():
                case Prepared():
                    host.prepared = True
                    self.lost.pop(host.number, None)
                    self.say(f"{host.shown} of this island is ready: {host.ranks} ranks")
                    self._news.set()
                case RankEnded() as ended:
                    rank = host.running.get(ended.rank)
                    if rank is not None and rank.life == ended.life:
                        status = -ended.signal or ended.status
                        rank.ended(status, ended.log, ended.tail)
                case Leaving():
                    host.leaving.set()
                    self._news.set()
                case Farewell() as last:
                    host.farewell = last.what  # it may connect anew before this is at an end
                    if last.code and not self._may_be_back(host, last):
                        self._refused[host.number] = operator_error(
                            "E410",
                            f"{host.shown} cannot take part: {last.what}",
                            why=last.why,
                            fix=last.fix,
                        )
                    raise HostLostError(last.what)
                case word:
                    raise HostLostError(f"it sent a {type(word).__name__}")

    def _may_be_back(self, host: Host, last: Farewell) -> bool:
        """Whether it is worth waiting for a host that has ended with an error.

        One whose ranks have never run may be unable to run any, and would be waited for in vain; as
        would one that has trained, and has other tokens by now.
        """
        return host.number in self._trained and (host.prepared or last.code in PASSING)
