"""What a monitor is shown: a log of twelve rounds, and pictures from wherever they come."""

from node.monitor.event_log import EventLog
from node.monitor.events import Notice, PeerJoined, Problem, RoundDone, RoundFailed, Started, Step
from protocols.identity import Identity

ME = str(Identity.from_seed(bytes(32)).peer_id)
PEERS = [ME, *(str(Identity.from_seed(bytes([n]) * 32).peer_id) for n in range(1, 3))]


def done(number, loss=3.0, **more):
    islands = {
        peer: {"loss": loss + i / 10, "tokens": 100, "distance": 0.1 + i / 100}
        for i, peer in enumerate(PEERS)
    }
    phases = {"compute": 1.0, "ready": 0.2, "match": 0.1, "exchange": 0.4, "certify": 0.05}
    values = {
        "round": number, "total_rounds": 50, "members": 3, "live": 3, "loss": loss,
        "validation_loss": loss, "consensus": 1 / (number + 1),
        "consensus_after": 0.25 / (number + 1), "agreeing": 3, "eta_s": 60.0,
        "phases": phases, "islands": islands, "sent_bytes": 1000, "raw_bytes": 8000,
    }  # fmt: skip
    return RoundDone(**(values | more))


def written_log(tmp_path):
    """A log of twelve rounds, one second apart, with what may happen between."""
    now = [1000.0]
    events = EventLog(tmp_path / "events.jsonl", clock=lambda: now[0])
    events.emit(Started(peer=ME, run="tiny-docs-8c41", version="0.1.0", device="cpu"))
    for number in range(12):
        now[0] += 1.0
        events.emit(Step(step=number, round=number, loss=3.0, tokens=64))
        events.emit(done(number, loss=5.0 - number / 4, dropped={PEERS[2]: "late"}))
    events.emit(PeerJoined(peer=PEERS[1], name="beta"))
    events.emit(RoundFailed(round=12, reason="no majority"))
    events.emit(Problem(code="E402", what="full", why="w", fix="f"))
    events.emit(Notice(text="so it ends"))
    events.close()
    return tmp_path / "events.jsonl"


async def pictures(source, count=100):
    found = []
    stream = source.pictures()
    async for picture in stream:
        found.append(picture)
        if len(found) == count:
            break
    await stream.aclose()
    return found
