"""Settings as a doctor gets them."""

from node.config import resolve


def config(tmp_path, **flags):
    return resolve({"dir": str(tmp_path / "state"), "listen": "127.0.0.1:0"} | flags, {})
