"""What is told of the codecs that links ask for."""

from __future__ import annotations

from dataclasses import dataclass, field

from gossip.common import AnyChain
from node.monitor.event_log import EventLog
from node.monitor.events import KnobSet


@dataclass
class CodecNews:
    """Tells when links change the codec of a round, or of this island's letters."""

    events: EventLog
    _told: dict[int, str] = field(default_factory=dict)  # by fragment

    def look(self, chain: AnyChain) -> None:
        """A round of a fragment is over."""
        chosen, before = chain.chosen, self._told.get(chain.fragment)
        if chosen is None or chosen.codec == before:
            return
        self._told[chain.fragment] = chosen.codec
        inputs = dict(chosen.inputs) | ({"fragment": chain.fragment} if chain.fragment else {})
        self.events.emit(
            KnobSet(name="codec", value=chosen.codec, before=before, inputs=inputs, why=chosen.why)
        )
