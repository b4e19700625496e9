"""Memory runs out on one of two ranks, by a real limit: both go on with half the micro-batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swarm_kit import islands, settings

from node.trainer.settings import SETTINGS_FILE

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

ROUNDS, STEPS, BATCH = 2, 2, 16
# eight sequences take a rank some 1.6 GiB in a step, four of them half of it
RUN = {
    "inner_steps": STEPS,
    "total_rounds": ROUNDS,
    "eval_every": 0,
    "data__batch_size": BATCH,
    "data__seq_len": 512,
    "model__max_seq_len": 512,
    "model__d_model": 64,
    "model__n_layers": 1,
    "model__n_heads": 2,
    "model__n_kv_heads": 2,
    "model__d_ff": 16_384,
}
ALLOWED = 800 << 20  # bytes beyond what the rank has before its first step

# Python runs this before anything else in every process of the island.
LIMIT = f'''
import importlib.abc, importlib.util, resource, sys
from pathlib import Path


class Limit(importlib.abc.MetaPathFinder):
    """Rank 1 gets no more memory from its first step on."""

    def find_spec(self, name, path, target=None):
        if name != "node.trainer.engine":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            gradients = module.Engine.gradients

            def limited(engine, *given):
                module.Engine.gradients = gradients
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                most = pages * resource.getpagesize() + {ALLOWED}
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
                return gradients(engine, *given)

            module.Engine.gradients = limited

        spec.loader.exec_module = exec_module
        return spec


if "--rank" in sys.orig_argv and sys.orig_argv[sys.orig_argv.index("--rank") + 1] == "1":
    sys.meta_path.insert(0, Limit())
'''


def test_both_ranks_halve_the_micro_batch_and_the_batch_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with islands(tmp_path) as made:
        plenty = made.new("--layout", "fsdp=2", *settings(**RUN))
        assert plenty.await_end(200) == 0, plenty.tail()
        assert not plenty.events("problem")
        (tmp_path / "limit").mkdir()
        (tmp_path / "limit" / "sitecustomize.py").write_text(LIMIT)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "limit"), prepend=":")
        short = made.new("--layout", "fsdp=2", *settings(**RUN))
        assert short.await_end(200) == 0, short.tail()
    problems = short.events("problem")  # one, or more where what is freed does not fit together
    assert {(problem["code"], problem["fatal"]) for problem in problems} == {("E401", False)}
    assert all("rank 1" in problem["what"] for problem in problems)
    log = (short.dir / "logs" / "trainer-rank1.log").read_text()
    assert "can't allocate memory" in log
    told = json.loads((short.dir / "logs" / SETTINGS_FILE).read_text())
    assert told["micro_batch"] == max(1, BATCH // 2 // 2 ** len(problems))
    assert short.rounds().keys() == set(range(ROUNDS))
    assert {event["tokens"] for event in short.events("step")} == {BATCH * 512}
    # the first step is of the same batch; later ones differ, since ranks that are started again
    # warm their learning rate up again
    assert short.losses()[1] == pytest.approx(plenty.losses()[1], rel=1e-4)
