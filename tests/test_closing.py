"""What a node says last."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.closing import last_words, newest_round

HOME = Path("/my runs/a")


def test_a_run_that_goes_on_can_be_gone_on_with() -> None:
    assert last_words("2 rounds done, as --rounds says", rounds=7, home=HOME) == (
        "ended: 2 rounds done, as --rounds says; the run stands at round 7; "
        "to go on: node start --resume --dir '/my runs/a'; "
        "its model: node export FOLDER --from '/my runs/a'"
    )


def test_what_the_newest_checkpoint_does_not_have_is_told(tmp_path: Path) -> None:
    assert newest_round(tmp_path / "checkpoints") is None
    for name in ("ckpt-00000002", "ckpt-00000010", "ckpt-odd", ".draft-7"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    saved = newest_round(tmp_path / "checkpoints")
    assert saved == 10
    told = "; the newest checkpoint is of round 10; "
    said = last_words("SIGINT", rounds=12, home=HOME, saved=saved)
    assert said.startswith(f"ended: SIGINT; the run stands at round 12{told}to go on: ")
    assert told in last_words("it is over", rounds=12, over=True, home=HOME, saved=saved)
    assert told not in last_words("SIGINT", rounds=10, home=HOME, saved=saved)


def test_one_that_is_over_can_be_exported() -> None:
    said = last_words("the run is over after 9 rounds", rounds=9, over=True, home=HOME)
    assert said.startswith("ended: the run is over after 9 rounds; its model: node export")
    assert "--resume" not in said


def test_without_a_checkpoint_nothing_is_promised() -> None:
    said = last_words("3 s are over", rounds=None)
    assert said == "ended: 3 s are over, before it took part in a run"
    said = last_words("SIGINT", rounds=0)
    assert said == "ended: SIGINT; the run stands at round 0"


def test_a_script_s_model_is_the_script_s() -> None:
    said = last_words("SIGTERM", rounds=3, home=HOME, script=True)
    assert said == "ended: SIGTERM; the run stands at round 3; to go on: resume=True"


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize("name", ["bootstrap", "start"])
def test_whoever_ends_says_so(command, name: str) -> None:
    """A seed that no run was brought to, and an island that is still on its way in."""
    ports = ("--listen", "127.0.0.1:0", "--api", "127.0.0.1:0")
    status, out, _ = command(name, *ports, "--seconds", "0.01")
    assert status == 0
    assert out.splitlines()[-1] == "ended: 0.01 s are over, before it took part in a run"
