"""Whether two hosts of an island have the same training tokens."""

from __future__ import annotations

from pathlib import Path

from node.hosts.tokens import fingerprint


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
