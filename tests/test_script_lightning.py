"""What the callback for Lightning's ``Trainer`` does with an exception."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

pytest.importorskip("lightning")


class Island:
    """An island that takes note of how it is left."""

    def __init__(self) -> None:
        self.left: list[type[BaseException] | None] = []

    def leave(self) -> None:
        self.left.append(None)

    def __exit__(self, kind: type[BaseException] | None, *given: object) -> None:
        self.left.append(kind)


def test_an_exception_leaves_the_swarm_as_with_does() -> None:
    """By itself: of several ranks the others may be anywhere, and would be waited for."""
    from node.script.lightning import SwarmCallback

    callback: Any = SwarmCallback(tokens_per_step=8)
    callback.island = island = Island()
    callback.on_exception(None, None, ZeroDivisionError())
    callback.on_exception(None, None, ZeroDivisionError())  # Lightning's own end fails, too
    assert island.left == [ZeroDivisionError]
    callback.island = island
    callback.on_train_end(None, None)
    assert island.left == [ZeroDivisionError, None]


def test_a_module_may_have_several_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    from node.script import lightning

    class Trainer:
        optimizers: ClassVar = ["one", "other"]
        global_step = 0

    given: list[Any] = []
    monkeypatch.setattr(lightning, "join", lambda _, *rest, **more: given.append((rest, more)))
    trainer: Any = Trainer()
    callback = lightning.SwarmCallback(tokens_per_step=8, name="a")
    callback.on_train_start(trainer, Any)
    assert given == [((["one", "other"],), {"name": "a"})]
    callback.on_train_start(trainer, Any)  # fit() again: its own checkpoint is there
    assert given[1][1] == {"name": "a", "resume": True}
