"""Settings as a doctor gets them, and programs that it finds."""

import stat

from node.config import resolve


def config(tmp_path, **flags):
    return resolve({"dir": str(tmp_path / "state"), "listen": "127.0.0.1:0"} | flags, {})


def program(path, content):
    """An executable file, in a folder of its own."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
