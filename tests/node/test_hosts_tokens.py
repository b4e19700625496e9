"""Whether two hosts of an island have the same training tokens."""

from __future__ import annotations

from pathlib import Path

from node.data.cached_file import write
from node.hosts.tokens import SAMPLE_TOKENS, fingerprint


def test_a_fingerprint_tells_tokens_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    data = bytes(range(256)) * 4000
    one.write_bytes(data)
    two.write_bytes(data)
    assert fingerprint(str(one), 256) == fingerprint(str(two), 256)
    two.write_bytes(data[:-1])
    assert fingerprint(str(one), 256) != fingerprint(str(two), 256)
    two.write_bytes(bytes(len(data)))
    assert fingerprint(str(one), 256) != fingerprint(str(two), 256)


def test_an_edit_between_the_samples_is_seen(tmp_path: Path) -> None:
    """Of tokens that were made from text, which have their hash beside them."""
    data = bytearray(bytes(range(256)) * 4000)
    shown = []
    for name in ("before", "after", "again"):
        path = tmp_path / name / "train.tokens"
        path.parent.mkdir()
        write(path, [bytes(data)])
        shown.append(fingerprint(str(path), 256))
        data[SAMPLE_TOKENS + 10] = 7 if name == "before" else 10
    assert shown[0] != shown[1]
    assert shown[0] == shown[2]
    path.write_bytes(bytes(len(data)))  # not what the note beside it says any more
    assert fingerprint(str(path), 256) not in shown
