"""What peers send to islands in pairs: letters, how far they are here, and shares taken back."""

from __future__ import annotations

from collections.abc import Sequence

from gossip.pairs.letters import VERB, WITHDRAW, Letters
from protocols.errors import Malformed, RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import TransferHeader
from protocols.transport import Incoming


def receive(boxes: Sequence[Letters]) -> None:
    """Have letters that come put into the boxes of their fragments, 0, 1, …"""
    wiring = boxes[0].wiring

    def header_of(data: bytes) -> tuple[TransferHeader, Letters]:
        header: TransferHeader = TransferHeader.decode(data)
        if not 0 <= header.fragment < len(boxes):
            raise Malformed(f"a letter about fragment {header.fragment} of {len(boxes)}")
        return header, boxes[header.fragment]

    async def on_letter(sender: PeerId, data: bytes, incoming: Incoming) -> bytes:
        try:
            header, box = header_of(data)
            await box.receive(sender, header, incoming)
        except RemoteProtocolError as error:
            boxes[0].mail.rejected(sender, error)
            raise
        return b""

    async def on_reached(sender: PeerId, data: bytes) -> bytes:
        header, box = header_of(data)
        return box.reached(sender, header)

    async def on_withdrawn(sender: PeerId, data: bytes) -> bytes:
        header, box = header_of(data)
        return await box.withdrawn(sender, header)

    largest = max(box.largest for box in boxes)
    wiring.transport.on_push(VERB, on_letter, max_length=largest)
    wiring.transport.on_call(VERB, on_reached)
    wiring.transport.on_call(WITHDRAW, on_withdrawn)
