"""Prometheus metrics, read from the node's state when somebody scrapes.

All names begin with ``swarm_`` (``node_`` belongs to node_exporter) and end in their unit. Labels
take values from the fixed lists below, so that no peer can grow the number of series.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import product
from statistics import median

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from node.errors import TABLE
from node.monitor.history_columns import PHASES
from node.monitor.state import NodeState
from protocols.errors import Reason

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("committed", "degraded", "failed")
TRAFFIC = ("gradients", "parameters", "state", "control", "dht", "relay")
ROLES = ("island", "server", "seed", "observer")
PEER_STATUSES = ("joining", "active", "leaving", "suspect", "dead", "left")
ALARMS = ("split", "silence", "office", "drift", "stall", "lag", "narrow", "loss", "checkpoint")
STRANGERS = ("garbage", "handshake", "limit", "request")
OTHER = "other"
GPU_FIGURES = (
    ("swarm_gpu_utilisation_ratio", "Share of the time that a kernel ran, 0 to 1", "utilisation"),
    ("swarm_gpu_memory_used_bytes", "By all processes", "memory_used"),
    ("swarm_gpu_memory_bytes", "That there are", "memory_total"),
    ("swarm_gpu_temperature_celsius", "Of the chip", "temperature_c"),
    ("swarm_gpu_power_watts", "Drawn by the board", "power_w"),
)


class SwarmCollector(Collector):
    """Turns a :class:`NodeState` into metric families at each scrape."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """All families."""
        state = self._state
        yield _gauge("swarm_healthy", "1 while the node is healthy", not state.unhealthy())
        build = GaugeMetricFamily("swarm_build_info", "Always 1", labels=("version", "role"))
        build.add_metric((state.node.version, state.node.role), 1)
        yield build
        yield _gauge("swarm_start_time_seconds", "Unix time of the start", state.node.started)
        outcomes = state.rounds.outcomes
        yield _counter(
            "swarm_rounds", "By outcome; failed: attempts at them", "outcome", OUTCOMES, outcomes
        )
        yield _gauge("swarm_round", "Rounds committed along the chain", state.round)
        yield _counter(
            "swarm_round_phase_seconds",
            "Seconds spent by phase of rounds",
            "phase",
            PHASES,
            state.rounds.phase_seconds,
        )
        if state.run is not None:
            yield _gauge("swarm_target_rounds", "After which the run is over", self._target())
        yield from self._training()
        yield from self._last_round()
        yield from self._traffic()
        yield from self._peers()
        yield from self._machine()
        yield _counter(
            "swarm_rejected",
            "Messages of peers thrown away, by reason",
            "reason",
            tuple(reason for reason in Reason if reason != OTHER),
            state.rejected,
        )
        yield _counter(
            "swarm_refused_peers",
            "Peers not let in, by error code",
            "code",
            tuple(TABLE),
            state.refused,
        )
        yield _counter(
            "swarm_strangers",
            "Connections and requests on the peers' port that came to nothing, by reason",
            "reason",
            STRANGERS,
            state.providers.strangers(),
        )
        met = "Opened at the same time by two that nobody can dial, past their relay"
        yield _total("swarm_met_connections", met, state.providers.met())
        taken = "Connections that peers opened to this node"
        yield _total("swarm_accepted_connections", taken, state.providers.accepted())
        stalled = "Messages given up on as their bytes came, or were taken, too slowly"
        yield _total("swarm_stalled_messages", stalled, state.providers.stalled())
        yield _total("swarm_log_lines_dropped", "Log lines the disk refused", state.log.dropped)

    def _target(self) -> int:
        return self._state.run.total_rounds if self._state.run is not None else 0

    def _training(self) -> Iterable[Metric]:
        training = self._state.training
        yield _total("swarm_trained_tokens", "Tokens trained by this node", training.tokens)
        short = "Times that memory did not suffice"
        yield _total("swarm_out_of_memory", short, training.out_of_memory)
        step = training.step
        if step is None:
            return
        yield _gauge("swarm_inner_step", "Inner steps taken", step.step)
        lost = "In a row whose loss or gradient is no number, to the newest one"
        yield _gauge("swarm_lost_inner_steps", lost, training.lost_steps)
        yield _gauge("swarm_learning_rate", "Of the inner optimizer", step.lr)
        speed = "Of this node while computing: in inner steps, without what it waits between them"
        yield _gauge("swarm_tokens_per_second", speed, step.tokens_per_second)
        steps_s = self._state.steps_s()
        yield _gauge("swarm_round_steps_seconds", "A round's inner steps, here", steps_s)
        for name, text, value in (
            ("swarm_loss_nats", "Training loss of the last inner step", step.loss),
            ("swarm_gradient_norm", "Before clipping", step.grad_norm),
            ("swarm_model_flops_utilisation_ratio", "MFU, 0 to 1", step.mfu),
            ("swarm_data_wait_seconds", "Of the last inner step, until its batch", step.data_s),
        ):
            if value is not None:
                yield _gauge(name, text, value)

    def _last_round(self) -> Iterable[Metric]:
        rounds = self._state.rounds
        validated = rounds.validation_loss  # the newest: not every round has one
        if validated is not None:
            yield _gauge("swarm_validation_loss_nats", "On the shared shard, the newest", validated)
        whole = rounds.last_whole()
        if whole is None:
            return
        _, done = whole
        newest, _ = rounds.newest[-1]
        yield _gauge("swarm_round_time_seconds", "Unix time of the newest one", newest)
        yield _gauge("swarm_round_members", "Islands merged in the last round", done.members)
        if (agreeing := self._state.agreeing(done)) is not None:
            yield _gauge("swarm_agreeing_peers", "Islands of bit-equal state now", agreeing)
        yield _gauge("swarm_round_sync_seconds", "Snapshot to application", done.sync_s)
        yield _gauge("swarm_round_wait_seconds", "The trainer stood still", done.wait_s)
        yield _gauge("swarm_round_tokens", "Merged in the last round", done.tokens)
        scales = [item["scale"] for item in done.islands.values() if "scale" in item]
        if scales:  # by name they stand in the round's event and in the API
            yield _gauge("swarm_least_scale_ratio", "Least that was left of a share", min(scales))
            discounted = sum(scale < 1 for scale in scales)
            yield _gauge("swarm_discounted_islands", "By the merge rule, last round", discounted)
        for name, text, value in (
            ("swarm_consensus_distance_ratio", "To the mean, before the merge", done.consensus),
            ("swarm_consensus_after_ratio", "To the mean, after the merge", done.consensus_after),
            ("swarm_compute_utilisation_ratio", "Of the last round, 0 to 1", done.utilisation),
        ):
            if value is not None:
                yield _gauge(name, text, value)

    def _traffic(self) -> Iterable[Metric]:
        traffic = self._state.providers.traffic()
        sent = {kind: item.sent for kind, item in traffic.items()}
        received = {kind: item.received for kind, item in traffic.items()}
        yield _counter("swarm_sent_bytes", "To peers, by kind", "kind", TRAFFIC, sent)
        yield _counter("swarm_received_bytes", "From peers, by kind", "kind", TRAFFIC, received)
        raw = "The elements that rounds sent, in fp32"
        yield _total("swarm_uncompressed_bytes", raw, self._state.rounds.raw_bytes)

    def _peers(self) -> Iterable[Metric]:
        views = self._state.peers()
        counts = Counter(
            (
                peer.role if peer.role in ROLES else OTHER,
                peer.status if peer.status in PEER_STATUSES else OTHER,
            )
            for peer in views
        )
        peers = GaugeMetricFamily("swarm_peers", "By role and status", labels=("role", "status"))
        for labels in product((*ROLES, OTHER), (*PEER_STATUSES, OTHER)):
            peers.add_metric(labels, counts[labels])
        yield peers
        trips = [peer.rtt_s for peer in views if peer.rtt_s is not None]
        if trips:
            found = {"min": min(trips), "median": median(trips), "max": max(trips)}
            yield _labelled("swarm_round_trip_seconds", "To the peers", "of_peers", found)
        alarms = dict.fromkeys(ALARMS, 0)
        for alarm in self._state.alarms(views):
            alarms[alarm.kind] += 1
        yield _labelled("swarm_alarms", "Alarms that stand now, by kind", "kind", alarms)

    def _machine(self) -> Iterable[Metric]:
        view = self._state.providers.machine()
        for name, text, value in (
            ("swarm_disk_free_bytes", "Where the state directory is", view.disk_free),
            ("swarm_memory_available_bytes", "Of this machine", view.memory_available),
            ("swarm_memory_used_bytes", "Of the daemon and its ranks together", view.memory_used),
        ):
            if value is not None:
                yield _gauge(name, text, value)
        for name, text, key in GPU_FIGURES:
            told = ((str(gpu.index), getattr(gpu, key)) for gpu in view.gpus)
            if known := {index: figure for index, figure in told if figure is not None}:
                yield _labelled(name, text, "gpu", known)
        if self._state.checkpoint is not None:
            when, saved = self._state.checkpoint
            yield _gauge("swarm_checkpoint_time_seconds", "Unix time of the newest one", when)
            yield _gauge("swarm_checkpoint_round", "Of the newest one", saved.round)


def registry(state: NodeState) -> CollectorRegistry:
    """A registry with this node's metrics and nothing else."""
    metrics = CollectorRegistry()
    metrics.register(SwarmCollector(state))
    return metrics


def exposition(metrics: CollectorRegistry) -> bytes:
    """The text a scrape gets."""
    text: bytes = generate_latest(metrics)
    return text


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


def _total(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _counter(
    name: str, text: str, label: str, known: tuple[str, ...], values: Mapping[str, float]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    rest = sum(value for key, value in values.items() if key not in known)
    for key in known:
        family.add_metric((key,), values.get(key, 0))
    family.add_metric((OTHER,), rest)
    return family
