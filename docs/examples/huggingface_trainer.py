"""Hugging Face ``Trainer`` in a swarm: one callback."""

import secrets
import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from node.script.huggingface import SwarmCallback


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of 32 bytes."""

    def __init__(self) -> None:
        with open(torch.__file__, "rb") as source:
            self.text = torch.frombuffer(bytearray(source.read()), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return len(self.text) // 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.text[32 * index : 32 * index + 32]
        return {"input_ids": window, "labels": window}


config = GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2)
arguments = TrainingArguments(
    "trained",
    per_device_train_batch_size=8,
    num_train_epochs=100,
    data_seed=secrets.randbits(31),  # else all islands read the same batches
    report_to=[],
    use_cpu=True,
)
swarm = SwarmCallback(peers=sys.argv[1:], tokens_per_step=8 * 32)
Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Windows(), callbacks=[swarm]).train()
