"""A training loop of one's own as an island: three lines are Atoll's.

python docs/examples/own_script.py                  makes a run, prints how others join
python docs/examples/own_script.py HOST:PORT/ID     joins it
"""

import sys

import torch
from torch import nn

import node

with open(torch.__file__, "rb") as source:
    text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
model = nn.Sequential(
    nn.Embedding(256, 64),
    nn.Flatten(),
    nn.Linear(64 * 16, 512),
    nn.ReLU(),
    nn.Linear(512, 256),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

island = node.join(model, optimizer, peers=sys.argv[1:])
going = True
while going:
    starts = torch.randint(len(text) - 16, (256,))
    windows = torch.stack([text[start : start + 17] for start in starts])
    loss = nn.functional.cross_entropy(model(windows[:, :16]), windows[:, 16])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    going = island.step(tokens=windows.numel(), loss=loss)
island.leave()
