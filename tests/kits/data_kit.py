"""Documents, a tokenizer trained on them, token folders, and a web server that can go wrong."""

from __future__ import annotations

import functools
import http.server
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data import topics
from typing import Any

from places import ROOT

from node.data.prepare import prepare
from node.data.tokenizer import ByteTokenizer, FileTokenizer

TEXTS = sorted(set(topics.topics.values()))


@functools.cache
def tokenizer_bytes(size: int = 600) -> bytes:
    """A byte-level BPE with an end of text, trained on a few of the documents."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS[:30], trainer)
    return tokenizer.to_str().encode()


def json_lines(path: Path, texts: list[str] = TEXTS, field: str = "text") -> Path:
    path.write_text(
        "".join(json.dumps({field: text, "id": i}) + "\n" for i, text in enumerate(texts))
    )
    return path


def folder(at: Path, *, bpe: bool = False, shard_tokens: int = 60_000) -> Path:
    """A token folder of the documents, in several files."""
    at.parent.mkdir(parents=True, exist_ok=True)
    source = json_lines(at.parent / f"{at.name}.jsonl")
    tokenizer = FileTokenizer(tokenizer_bytes()) if bpe else ByteTokenizer()
    prepare([str(source)], at, tokenizer, shard_tokens=shard_tokens)
    return at


class Server:
    """What a web server was asked for, and which answers it is to spoil or leave out."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.spoil: dict[str, int] = {}  # by file name: so many answers have a wrong byte
        self.away = 0  # so many answers are an error, then
        self.after = 0  # answers before those
        self.status = 503
        self.url = ""
        self.stands, self.ended = threading.Event(), threading.Event()


@contextmanager
def serving(root: Path, stalls: str = "") -> Iterator[Server]:
    """The files under ``root`` on a port of the loopback address.

    An answer of the name ``stalls`` stands still in its midst to the end; ``stands`` tells of it.
    """
    state = Server()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(root))

        def log_message(self, *arguments: object) -> None:
            """Quietly."""

        def do_HEAD(self) -> None:
            if not self.is_away():
                super().do_HEAD()

        def is_away(self) -> bool:
            if state.away <= 0:
                return False
            if state.after > 0:
                state.after -= 1
                return False
            state.away -= 1
            if state.status:
                self.send_error(state.status)
            else:  # no answer at all
                self.connection.close()
            return True

        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2]
            state.asked.append(name)
            if self.is_away():
                return None
            if state.spoil.get(name, 0) <= 0:
                return super().do_GET()
            state.spoil[name] -= 1
            data = bytearray(Path(self.translate_path(self.path)).read_bytes())
            data[random.Random(0).randrange(len(data))] ^= 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
            return None

        def copyfile(self, source: Any, outputfile: Any) -> None:
            if stalls and self.path.endswith(f"/{stalls}"):
                outputfile.write(source.read(1000))
                outputfile.flush()
                state.stands.set()
                state.ended.wait(60)
            else:
                super().copyfile(source, outputfile)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield state
    finally:
        state.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


def broken_off(
    server: Server,
    command: list[str],
    end: signal.Signals,
    before: Callable[[], Any],
    **environ: str,
) -> None:
    """Run our command until an answer of the server stands still, then end it: with one word.

    ``before``: what is there by then.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "node", *command],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
    )
    with process:
        try:
            assert server.stands.wait(90)
            assert before()
            process.send_signal(end)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, said.split()[-1]) == (130, "interrupted")
