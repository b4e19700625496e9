"""A rank's file of a sharded checkpoint, written tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from node.checkpoints.tensor_files import Entry, leave_note, write_entries
from node.trainer.trainer_state import FOLDER


class ShardWriter(HuggingFaceStorageWriter):
    """Writes a rank's tensors one by one, into the same file as torch's writer does.

    torch's holds a whole file in memory twice before it writes.
    """

    def __init__(self, draft: Path) -> None:
        """``draft`` is a checkpoint's; the trainer's files have a folder of their own in it."""
        self.draft, self.folder = draft, draft / FOLDER
        super().__init__(str(self.folder), save_distributed=True)

    def write_data(
        self, plan: SavePlan, planner: SavePlanner
    ) -> torch.futures.Future[list[WriteResult]]:
        """Write what is planned for this rank, and leave a note of its hash."""
        if plan.items:
            name = f"shard-{plan.storage_data['shard_index']:05d}-model-00001-of-00001.safetensors"
            entries, places = [], {}
            for item in plan.items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                assert item.tensor_data is not None
                places[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
                entries.append(Entry.of_tensor(item.index.fqn, tensor))
            says = {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
            path = self.folder / name
            leave_note(self.draft, path, write_entries(path, entries, says))
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])  # what a reader has to know is in the files
        return done
