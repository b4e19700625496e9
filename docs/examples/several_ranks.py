"""A script of several ranks as one island, sharded by FSDP2 or copied by DDP.

torchrun --nproc-per-node 2 docs/examples/several_ranks.py fsdp [HOST:PORT/ID]

Each rank has a GPU of its own where there are enough. Every rank joins, steps and leaves; the node
runs beside rank 0. On two hosts, with K = 0 and 1 (so
that rank 0, and with it the node, is always on the same one):

torchrun --nnodes 2 --node-rank K --master-addr HOST0 --nproc-per-node 2 \\
    docs/examples/several_ranks.py fsdp [HOST:PORT/ID]
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import node

gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpus else torch.device("cpu")
if gpus:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if gpus else "gloo")
# no torch.manual_seed: a seed that islands share makes them read the same batches
with open(torch.__file__, "rb") as source:
    text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()
model: nn.Module = nn.Sequential(
    nn.Embedding(256, 64),
    nn.Flatten(),
    nn.Linear(64 * 16, 512),
    nn.ReLU(),
    nn.Linear(512, 256),
).to(device)
if sys.argv[1] == "fsdp":
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with node.join(model, optimizer, peers=sys.argv[2:]) as island:
    while not island.over:
        starts = torch.randint(len(text) - 16, (128,))
        windows = torch.stack([text[start : start + 17] for start in starts]).to(device)
        loss = nn.functional.cross_entropy(model(windows[:, :16]), windows[:, 16])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        island.step(tokens=dist.get_world_size() * windows.numel(), loss=loss)
dist.destroy_process_group()
