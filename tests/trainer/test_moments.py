"""A trainer's moments as a file: written for newcomers, read by one, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainer_kit import Bench, begin, committing, tiny_manifest

from bootstrap.manifest import Manifest
from node.trainer.channel import Command, Donate, Donated, Report, Save, StepDone, Stop
from node.trainer.layout import Layout
from node.trainer.moments import SECOND, Donation, MomentLayout, faults, mapped, moments_last
from node.trainer.optim import REENTRY_STEPS

STEPS = REENTRY_STEPS + 4
ENDLESS = committing(10**6)


def manifest_of(**inner: object) -> Manifest:
    manifest = tiny_manifest()
    return manifest.model_copy(update={"inner": manifest.inner.model_copy(update=inner)})


def moment_layout_of(manifest: Manifest) -> MomentLayout:
    return MomentLayout.of(Layout.of_manifest(manifest), manifest.inner)


def donor(
    directory: Path,
    path: Path,
    *,
    steps: int = STEPS,
    manifest: Manifest | None = None,
    meanwhile: Callable[[Bench, Report], list[Command]] = ENDLESS,
    **how: bool,
) -> tuple[Bench, Donated, dict[str, Tensor]]:
    """A trainer that is asked after so many inner steps; its answer, and what it had then."""
    had: dict[str, Tensor] = {}
    if not path.exists():
        path.touch()

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == steps:
            had.update(kept(bench))
            return [Donate(str(path))]
        if isinstance(report, Donated):
            return [Stop()]
        return meanwhile(bench, report)

    bench = Bench(directory, answer, manifest=manifest or manifest_of())
    [donated] = bench.run(begin(**how)).of(Donated)
    return bench, donated, had


def kept(bench: Bench) -> dict[str, Tensor]:
    """What the optimizer keeps, by parameter."""
    optimizer, found = bench.trainer.optimizer, {}
    for name, (parameter,) in bench.trainer.weights.parts.items():
        for key, value in optimizer.state[parameter].items():
            found[f"{name} {key}"] = value.clone()
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_newcomer_has_its_donors_moments(tmp_path: Path, optimizer: str) -> None:
    path, manifest = tmp_path / "moments", manifest_of(optimizer=optimizer)
    _, donated, theirs = donor(tmp_path / "one", path, manifest=manifest)
    assert (donated.steps, donated.problem) == (STEPS, "")
    assert path.stat().st_size == 4 * moment_layout_of(manifest).size
    other = Bench(tmp_path / "other", committing(1), manifest=manifest)
    other.run(begin(moments=str(path), moments_steps=STEPS), Stop())
    mine = kept(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert path.exists()  # ranks that die before they have begun want it again


def test_a_donor_trains_on_while_its_moments_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written are those that it had when it was asked."""
    path, append = tmp_path / "moments", Donation._append
    further = threading.Event()

    def slow(donation: Donation, copy: Tensor) -> None:
        assert further.wait(60)
        append(donation, copy)

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == STEPS + 3:
            further.set()
        return ENDLESS(bench, report)

    monkeypatch.setattr(Donation, "_append", slow)
    bench, donated, theirs = donor(tmp_path / "one", path, meanwhile=answer)
    assert bench.trainer.step >= STEPS + 3
    assert (donated.steps, donated.problem) == (STEPS, "")
    other = Bench(tmp_path / "other", committing(1), manifest=manifest_of())
    other.run(begin(moments=str(path), moments_steps=STEPS), Stop())
    mine = kept(other)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_without_memory_for_copies_no_more_than_one_tensor_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, add, waiting = tmp_path / "moments", Donation.add, list[int]()

    def counted(donation: Donation, whole: Tensor) -> None:
        add(donation, whole)
        waiting.append(len(donation._pending))

    monkeypatch.setattr("node.trainer.moments.available", lambda: 0)
    monkeypatch.setattr(Donation, "add", counted)
    donor(tmp_path / "one", path)
    assert set(waiting) == {1}
    assert path.stat().st_size == 4 * moment_layout_of(manifest_of()).size


@pytest.mark.parametrize("then", ["stop", "again"])
def test_moments_that_nobody_waits_for_are_written_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    path, again = tmp_path / "moments", tmp_path / "again"
    path.touch()
    if then == "again":
        again.touch()
    append, give_up, given_up = Donation._append, Donation.give_up, threading.Event()

    def slow(donation: Donation, copy: Tensor) -> None:
        assert donation.path == again or given_up.wait(60)
        append(donation, copy)

    def noted(donation: Donation) -> None:
        donation.given_up = True
        given_up.set()
        give_up(donation)

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == STEPS:
            return [Donate(str(path))]
        if isinstance(report, StepDone) and report.step == STEPS + 2:
            return [Stop()] if then == "stop" else [Donate(str(again))]
        return [Stop()] if isinstance(report, Donated) else ENDLESS(bench, report)

    monkeypatch.setattr(Donation, "_append", slow)
    monkeypatch.setattr(Donation, "give_up", noted)
    script = Bench(tmp_path / "one", answer, manifest=manifest_of()).run(begin())
    told = [donated.path for donated in script.of(Donated)]
    assert told == ([] if then == "stop" else [str(again)])
    assert path.stat().st_size == 0
    assert again.exists() == (then == "again")


@pytest.mark.parametrize("when", ["before it begins", "meanwhile"])
def test_moments_whose_file_is_taken_away_are_written_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The daemon gives them up; the answer to what it asks for next is not mistaken for theirs."""
    path, copies, written = tmp_path / "moments", list[Tensor](), list[int]()
    append = Donation._append

    def noted(donation: Donation, copy: Tensor) -> None:
        copies.append(copy)
        if len(copies) == 2:
            path.unlink()
        append(donation, copy)
        assert donation._file is not None
        written.append(donation._file.tell())

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == STEPS:
            return [Donate(str(path))]
        last = isinstance(report, StepDone) and report.step == STEPS + 3
        return [Stop()] if last else ENDLESS(bench, report)

    monkeypatch.setattr(Donation, "_append", noted)
    monkeypatch.setattr("node.trainer.moments.available", lambda: 0)  # one after the other
    if when == "meanwhile":
        path.touch()
    script = Bench(tmp_path / "one", answer, manifest=manifest_of()).run(begin())
    assert script.of(Donated) == []
    assert not path.exists()
    if when == "meanwhile":
        assert len(written) in (2, 3)
        assert written[-1] == 4 * sum(copy.numel() for copy in copies[:2])
    else:
        assert written == []


def test_muons_matrices_have_no_second_moment_on_the_way() -> None:
    adam, muon = (moment_layout_of(manifest_of(optimizer=name)) for name in ("adamw", "muon"))
    size = Layout.of_manifest(tiny_manifest()).size
    assert adam.size == 2 * size
    assert size < muon.size < 1.6 * size
    ends = [p.start + p.entry.size for p in muon.ranges]
    assert [p.start for p in muon.ranges[1:]] == ends[:-1]
    assert ends[-1] == muon.size
    assert all("layers." not in p.entry.name for p in muon.ranges if p.moment == SECOND
               and len(p.entry.shape) > 1)  # fmt: skip


def test_with_a_donors_moments_the_learning_rate_does_not_warm_up(tmp_path: Path) -> None:
    path = tmp_path / "moments"
    donor(tmp_path / "one", path)
    other = Bench(tmp_path / "other", committing(1))
    rates = [r.lr for r in other.run(
        begin(step=50, moments=str(path), moments_steps=STEPS)).of(StepDone)]  # fmt: skip
    assert rates[0] > 0.4 * other.settings.manifest.inner.lr
    assert all(b <= a for a, b in pairwise(rates))


def test_cold_moments_are_not_given(tmp_path: Path) -> None:
    path = tmp_path / "moments"
    assert donor(tmp_path / "one", path, steps=REENTRY_STEPS - 1)[1].steps == 0
    assert donor(tmp_path / "two", path, steps=REENTRY_STEPS - 1, rewarm=True)[1].steps == 0
    assert path.stat().st_size == 0


def test_a_disk_that_takes_no_file_ends_nobodys_training(tmp_path: Path) -> None:
    path = tmp_path / "nowhere"
    path.mkdir()  # which cannot be written to
    bench, donated, _ = donor(tmp_path / "one", path)
    assert "nowhere" in donated.problem
    assert bench.trainer.step == STEPS


def test_a_run_that_forgets_moments_or_uses_none_has_none_to_give() -> None:
    assert moments_last(tiny_manifest())
    assert not moments_last(manifest_of(keep_moments=False))
    assert not moments_last(Manifest(mode="allreduce"))


def test_who_resumes_keeps_moments_of_its_own(tmp_path: Path) -> None:
    def saving(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == 3:
            return [Save(str(tmp_path)), Stop()]
        return []

    before = Bench(tmp_path / "before", saving, manifest=manifest_of())
    before.run(begin())
    donor(tmp_path / "donor", path := tmp_path / "moments")
    after = Bench(tmp_path / "after", committing(1), manifest=manifest_of())
    resume = begin(resume=str(tmp_path), moments=str(path), moments_steps=STEPS)
    after.run(resume, Stop())
    mine, own = kept(after), kept(before)
    assert mine.keys() == own.keys()
    assert all(torch.equal(mine[key], own[key]) for key in own)


def test_a_file_of_another_length_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(4 * 99))
    with pytest.raises(OSError, match="not of 100 moments"):
        mapped(tmp_path / "file", 100)


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (0, float("nan"), "not finite"),
        (-1, float("inf"), "not finite"),
        (-1, -1e-12, "negative"),
        (5, 1e6, "larger than"),
        (5, -1e6, "larger than"),
    ],
)
def test_moments_that_no_training_makes_are_refused(
    tmp_path: Path, where: int, value: float, why: str
) -> None:
    manifest, path = manifest_of(), tmp_path / "moments"
    donor(tmp_path / "one", path, manifest=manifest)
    layout = moment_layout_of(manifest)
    vector = mapped(path, layout.size)
    assert faults(vector, layout, manifest.inner) == ""
    vector[where] = value
    assert why in faults(vector, layout, manifest.inner)


def test_gradients_of_any_kind_make_moments_that_pass() -> None:
    """The worst case of the bound: gradients that grow as a power of the betas' quotient."""
    manifest = manifest_of()
    layout, (beta1, beta2) = moment_layout_of(manifest), manifest.inner.betas
    generator = torch.Generator().manual_seed(0)
    half = layout.size // 2
    for growth in (1.0, beta2 / beta1, beta1 / beta2, 0.5, 2.0):
        vector = torch.zeros(layout.size)
        first, second = vector[:half], vector[half:]
        for step in range(60):
            gradient = growth**step * (1 + 0.01 * torch.randn(half, generator=generator))
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        assert faults(vector, layout, manifest.inner) == "", growth
