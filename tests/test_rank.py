"""How a trainer rank's process is set up."""

import threading

import torch

from node.trainer.rank import set_up_arithmetic

TINY = 1e-39  # below 2^-126: fp32 has it with fewer digits only


def test_numbers_too_small_for_full_speed_count_as_zero_in_the_rank_alone() -> None:
    found = []

    def compute() -> None:  # in a thread, whose arithmetic ends with it
        set_up_arithmetic(torch.get_num_threads())
        found.append(torch.full((64,), TINY).mul(0.5).sum().item())

    rank = threading.Thread(target=compute)
    rank.start()
    rank.join()
    daemon = torch.full((64,), TINY).mul(0.5).sum().item()
    assert found == [0.0]
    assert 30e-39 < daemon < 34e-39
