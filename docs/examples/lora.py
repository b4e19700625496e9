"""LoRA in a loop of one's own: a frozen base, and adapters that a swarm trains.

python docs/examples/lora.py                  makes a run, prints how others join
python docs/examples/lora.py HOST:PORT/ID     joins it

What is frozen is not merged, but has to be the same on all islands, or E201 says what differs.
"""

import sys

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import node


class Adapted(nn.Module):
    """A frozen layer with B A x beside it (LoRA, arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., in] -> [..., out]."""
        return self.base(x) + x @ self.a.T @ self.b.T


with open(torch.__file__, "rb") as source:
    text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
torch.manual_seed(0)  # stands for loading a trained base, the same everywhere
model = nn.Sequential(
    nn.Embedding(256, 64).requires_grad_(False),
    nn.Flatten(),
    Adapted(nn.Linear(64 * 16, 512)),
    nn.ReLU(),
    Adapted(nn.Linear(512, 256)),
)
torch.seed()  # the data must not be the same
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-3)

with node.join(model, optimizer, peers=sys.argv[1:]) as island:
    try:
        while not island.over:
            starts = torch.randint(len(text) - 16, (256,))
            windows = torch.stack([text[start : start + 17] for start in starts])
            loss = nn.functional.cross_entropy(model(windows[:, :16]), windows[:, 16])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            island.step(tokens=windows.numel(), loss=loss)
    finally:  # also after Ctrl-C
        save_file(island.outer_parameters(), "adapters.safetensors")
