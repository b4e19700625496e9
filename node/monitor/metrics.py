"""Prometheus metrics, read from the node's state when somebody scrapes.

All names begin with ``swarm_`` (``node_`` belongs to node_exporter) and end in their unit. Labels
take values from the fixed lists below, so that no peer can grow the number of series.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from node.errors import TABLE
from node.monitor.history import PHASES
from node.monitor.state import NodeState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OUTCOMES = ("committed", "degraded", "skipped", "failed")
TRAFFIC = ("gradients", "state", "control", "dht", "relay")
PEER_STATUSES = ("joining", "active", "leaving")
REASONS = ("malformed", "signature", "stale", "non-finite", "norm", "outlier")
STRANGERS = ("garbage", "handshake", "limit", "request")
OTHER = "other"


class SwarmCollector(Collector):
    """Turns a :class:`NodeState` into metric families at each scrape."""

    def __init__(self, state: NodeState) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """All families."""
        state = self._state
        yield _gauge("swarm_healthy", "1 while the node is healthy", not state.unhealthy())
        yield _gauge("swarm_start_time_seconds", "Unix time of the start", state.node.started)
        yield _counter("swarm_rounds", "Rounds by outcome", "outcome", OUTCOMES, state.outcomes)
        yield _gauge("swarm_round", "Rounds committed along the chain", state.round)
        yield _counter(
            "swarm_round_phase_seconds",
            "Seconds spent by phase of rounds",
            "phase",
            PHASES,
            state.phase_seconds,
        )
        yield from self._training()
        yield from self._last_round()
        yield from self._traffic()
        yield self._peers()
        yield _counter(
            "swarm_rejected",
            "Messages of peers thrown away, by reason",
            "reason",
            REASONS,
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
        dropped = CounterMetricFamily("swarm_log_lines_dropped", "Log lines the disk refused")
        dropped.add_metric((), state.log.dropped)
        yield dropped

    def _training(self) -> Iterable[Metric]:
        state = self._state
        tokens = CounterMetricFamily("swarm_trained_tokens", "Tokens trained by this node")
        tokens.add_metric((), state.tokens)
        yield tokens
        step = state.step
        if step is None:
            return
        yield _gauge("swarm_inner_step", "Inner steps taken", step.step)
        yield _gauge("swarm_learning_rate", "Of the inner optimizer", step.lr)
        yield _gauge("swarm_tokens_per_second", "Of this node", step.tokens_per_second)
        for name, text, value in (
            ("swarm_loss_nats", "Training loss of the last inner step", step.loss),
            ("swarm_gradient_norm", "Before clipping", step.grad_norm),
            ("swarm_model_flops_utilisation_ratio", "MFU, 0 to 1", step.mfu),
        ):
            if value is not None:
                yield _gauge(name, text, value)

    def _last_round(self) -> Iterable[Metric]:
        if not self._state.rounds:
            return
        done = self._state.rounds[-1][1]
        yield _gauge("swarm_round_members", "Islands merged in the last round", done.members)
        yield _gauge("swarm_agreeing_peers", "Peers of bit-equal state", done.agreeing)
        yield _gauge("swarm_round_sync_seconds", "Snapshot to application", done.sync_s)
        for name, text, value in (
            ("swarm_validation_loss_nats", "On the shared shard", done.validation_loss),
            ("swarm_consensus_distance_ratio", "To the mean, before the merge", done.consensus),
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
        raw = CounterMetricFamily("swarm_uncompressed_bytes", "What rounds sent, in fp32")
        raw.add_metric((), self._state.raw_bytes)
        yield raw

    def _peers(self) -> Metric:
        counts = dict.fromkeys((*PEER_STATUSES, OTHER), 0)
        for peer in self._state.peers():
            counts[peer.status if peer.status in PEER_STATUSES else OTHER] += 1
        family = GaugeMetricFamily("swarm_peers", "Peers by status", labels=("status",))
        for status, count in counts.items():
            family.add_metric((status,), count)
        return family


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


def _counter(
    name: str, text: str, label: str, known: tuple[str, ...], values: Mapping[str, float]
) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    rest = sum(value for key, value in values.items() if key not in known)
    for key in known:
        family.add_metric((key,), values.get(key, 0))
    family.add_metric((OTHER,), rest)
    return family
