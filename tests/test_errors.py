"""The table of errors: complete, worded, documented, and the only source of codes."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from node import errors
from node.errors import TABLE, operator_error
from protocols.errors import IdentityMismatch, TransferStalled, Unreachable, Why

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("kind", TABLE.values(), ids=TABLE)
def test_every_row_says_what_why_and_what_to_do(kind):
    assert re.fullmatch(r"E\d{3}", kind.code)
    for text in (kind.title, kind.why, kind.fix):
        assert len(text) > 5
        assert "|" not in text  # it stands in a Markdown table
        assert text == text.strip().rstrip(".")
    assert kind.exit_code in (1, 2, 70)


def test_the_table_is_in_order_and_has_no_doubles():
    assert list(TABLE) == sorted(TABLE)
    assert len(errors._ROWS) == len(TABLE)


def test_the_page_is_current():
    assert (ROOT / "docs" / "errors.md").read_text(encoding="utf-8") == errors.document(), (
        "run: python -m node.errors > docs/errors.md"
    )


def test_the_page_is_what_the_command_writes():
    written = subprocess.run(
        [sys.executable, "-m", "node.errors"], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    assert written == errors.document()


def test_every_code_that_is_raised_is_in_the_table():
    raised = set()
    for package in ("protocols", "diloco", "gossip", "bootstrap", "node"):
        for path in (ROOT / package).rglob("*.py"):
            raised |= set(re.findall(r"\"(E\d{3})\"", path.read_text(encoding="utf-8")))
    assert raised <= set(TABLE)


def test_what_is_left_out_comes_from_the_table():
    error = operator_error("E301")
    assert error.text() == (
        f"error E301: {TABLE['E301'].title}\n  why: {TABLE['E301'].why}\n  fix: {TABLE['E301'].fix}"
    )
    assert operator_error("E204").exit_code == 2
    assert operator_error("E204", exit_code=3).exit_code == 3
    assert (
        operator_error("E301", "x", why="y", fix="z").text() == "error E301: x\n  why: y\n  fix: z"
    )


def test_each_way_of_being_unreachable_has_its_own_advice():
    told = {why: errors.from_transport(Unreachable("a:1", why, "detail"), "a:1") for why in Why}
    assert {error.code for error in told.values()} == {"E101"}
    assert len({error.fix for error in told.values()}) == len(Why)
    for why, error in told.items():
        assert error.why == f"{why.value} (detail)"
        assert "a:1" in error.what


def test_an_identity_mismatch_tells_both():
    error = errors.from_transport(IdentityMismatch("a:1", "AAA", "BBB"), "a:1")
    assert error.code == "E103"
    assert error.why == "expected AAA, got BBB"


def test_other_transport_errors_are_e101():
    error = errors.from_transport(TransferStalled("no progress for 5 s"), "a:1")
    assert (error.code, error.why) == ("E101", "no progress for 5 s")


def test_port_in_use_names_the_process():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        error = errors.port_in_use(f"127.0.0.1:{port}", "--listen")
        assert error.code == "E303"
        if Path("/proc/net/tcp").exists():
            assert f"process {os.getpid()}" in error.why
    assert "--listen 127.0.0.1:0" in error.fix


def test_the_other_constructors():
    assert errors.config_mismatch(["model.n_layers 12 != 16"]).why == "model.n_layers 12 != 16"
    versions = errors.protocol_mismatch("protocol 1", "protocol 2").why
    assert "protocol 1" in versions
    assert "protocol 2" in versions
    assert "4.2 s behind the median of 5 peers" in errors.clock_skew(-4.2, 3, 5).why
    seeds = errors.no_peers({"a:1": "refused", "b:2": "no answer"}, 60)
    assert "a:1: refused\n" in seeds.why
    assert "b:2: no answer" in seeds.why
    died = errors.trainer_died(0, -9, Path("/x/rank0.log"))
    assert "/x/rank0.log" in died.fix
    assert "memory" in died.fix
