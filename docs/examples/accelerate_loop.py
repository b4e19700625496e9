"""Hugging Face Accelerate in a swarm: the loop stays as it is, with gradients accumulated."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import node

with open(torch.__file__, "rb") as source:
    text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
windows = text.unfold(0, 17, 5)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = nn.Sequential(
    nn.Embedding(256, 64), nn.Flatten(), nn.Linear(64 * 16, 512), nn.ReLU(), nn.Linear(512, 256)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(windows), batch_size=128, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

with node.join(model, optimizer, peers=sys.argv[1:]) as island:
    while not island.over:
        for (batch,) in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch[:, :16]), batch[:, 16])
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                tokens = 2 * batch.numel() * accelerator.num_processes  # of the whole island
                if not island.step(tokens=tokens, loss=loss):
                    break
