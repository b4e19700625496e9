"""Lightning in a swarm: one callback."""

import sys

import lightning
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from node.script.lightning import SwarmCallback


class NextByte(lightning.LightningModule):
    """The next byte from the last sixteen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(256, 64),
            nn.Flatten(),
            nn.Linear(64 * 16, 512),
            nn.ReLU(),
            nn.Linear(512, 256),
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """The mean loss of a batch of windows, int64 [n, 17]."""
        windows = batch[0]
        return nn.functional.cross_entropy(self.layers(windows[:, :16]), windows[:, 16])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The inner optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


with open(torch.__file__, "rb") as source:
    text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
loader = DataLoader(TensorDataset(text.unfold(0, 17, 5)), batch_size=256, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=100,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    callbacks=[SwarmCallback(peers=sys.argv[1:], tokens_per_step=256 * 17)],
)
trainer.fit(NextByte(), loader)
