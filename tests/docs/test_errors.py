"""The table of errors: complete, worded, documented, and the only source of codes."""

import re
import subprocess
import sys

import pytest
from places import ROOT

from node import errors
from node.errors import TABLE, operator_error


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


def test_every_code_is_met_in_a_test():
    """By its real cause: those of the way in are in tests/node/test_badinput.py."""
    met = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.name != "test_errors.py":
            met |= set(re.findall(r"\bE\d{3}\b", path.read_text(encoding="utf-8")))
    assert set(TABLE) <= met


def test_what_is_left_out_comes_from_the_table():
    error = operator_error("E301")
    assert error.text() == (
        f"error E301: {TABLE['E301'].title}\n  why: {TABLE['E301'].why}\n  fix: {TABLE['E301'].fix}"
    )
    assert operator_error("E204").exit_code == 2
    assert (
        operator_error("E301", "x", why="y", fix="z").text() == "error E301: x\n  why: y\n  fix: z"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("at https://me:secret@host/a: no", "at https://host/a: no"),
        ("'s3://AKIA:secret@bucket/x'", "'s3://bucket/x'"),
        ("https://me:sec@ret@host/a@b", "https://host/a@b"),
        ("https://host/a?X-Amz-Signature=secret failed", "https://host/a?… failed"),
        ("me@host and http://host/a@b", "me@host and http://host/a@b"),
        ("127.0.0.1:4390/12D3KooW…", "127.0.0.1:4390/12D3KooW…"),
    ],
)
def test_what_is_told_and_logged_has_no_credentials(given, told):
    error = operator_error("E407", given, why=given, fix=given)
    assert (error.what, error.why, error.fix) == (told, told, told)
