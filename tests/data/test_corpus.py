"""Corpora: determinism, what is held out, what is never trained on, the cache, and refusals."""

import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path
from pydoc_data import topics

import pytest

from bootstrap.manifest import Data
from node.data import cached_file, plain_text
from node.data.cached_file import cache_folder
from node.trainer.corpus import Corpus, collect, is_held_out
from protocols.errors import OperatorError
from protocols.files import DRAFT, replacing

SEQ_LEN = 64
PROSE = "\n\n".join(sorted(set(topics.topics.values())))


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text(PROSE, encoding="utf-8")
    return path


@pytest.fixture
def corpus(text_file: Path, tmp_path: Path) -> Corpus:
    return collect(text(text_file), tmp_path)


def text(*paths: Path) -> Data:
    return Data(recipe="text", path=os.pathsep.join(map(str, paths)))


def windows(shard: bytes) -> list[bytes]:
    return [shard[i : i + SEQ_LEN + 1] for i in range(0, len(shard), SEQ_LEN + 1)]


def test_text_becomes_distinct_documents_that_are_all_of_it(corpus: Corpus):
    documents = list(corpus)
    assert len(documents) == len(set(documents)) == corpus.documents > 200
    assert corpus.size == sum(map(len, documents)) + len(documents) == corpus.path.stat().st_size
    assert corpus.size > 0.8 * len(PROSE.encode())  # topics quote one another
    kept = b"\n".join(documents)
    assert all(line.strip().encode() in kept for line in PROSE.splitlines()[::7])


def test_it_is_the_same_twice_and_elsewhere(corpus: Corpus, text_file: Path, tmp_path: Path):
    again = collect(text(text_file), tmp_path / "other")
    assert again.digest == corpus.digest
    assert again.make_shard(16, SEQ_LEN) == corpus.make_shard(16, SEQ_LEN)


def test_a_document_is_held_out_by_its_hash_alone(corpus: Corpus):
    share = sum(map(is_held_out, corpus)) / corpus.documents
    assert 0.02 < share < 0.09
    pool = {d for d in corpus if is_held_out(d)}
    for window in windows(corpus.make_shard(16, SEQ_LEN)):
        assert any(piece in d for piece in window.split(b"\0") for d in pool)


def test_nothing_evaluated_is_trained_on(corpus: Corpus):
    shard = corpus.make_shard(16, SEQ_LEN)
    assert len(shard) == 16 * (SEQ_LEN + 1)
    training = corpus.training_file(shard, SEQ_LEN).read_bytes()
    assert len(training) > 0.85 * corpus.size
    documents = training.split(b"\0")
    assert not any(is_held_out(document) for document in documents[:-1])
    assert not any(window in training for window in windows(shard) if b"\0" not in window)


def test_a_joiner_with_other_text_drops_what_the_shard_has(corpus: Corpus, tmp_path: Path):
    """Cut differently, the creator's held-out text would slip through a rule on hashes."""
    shard = corpus.make_shard(16, SEQ_LEN)
    window = next(w for w in windows(shard) if b"\0" not in w)
    mixed, own = tmp_path / "mine.txt", tmp_path / "own.txt"
    copies = [
        f"Number {i}, then {window.decode(errors='replace')} and more.\n\n" for i in range(99)
    ]
    mixed.write_text("".join(copies), encoding="utf-8")
    own.write_text("".join(f"My own text, paragraph {i}.\n\n" for i in range(99)))
    mine = collect(text(mixed, own), tmp_path / "joiner")
    assert any(window in document and not is_held_out(document) for document in mine)
    training = mine.training_file(shard, SEQ_LEN).read_bytes()
    assert window not in training
    assert b"My own text, paragraph" in training


def test_shards_are_spread_and_bounded(corpus: Corpus):
    assert len(set(windows(corpus.make_shard(40, SEQ_LEN)))) == 40
    pool = sum(len(d) + 1 for d in corpus if is_held_out(d))
    most = corpus.make_shard(10**6, SEQ_LEN)
    assert len(windows(most)) == pool // (SEQ_LEN + 1)
    assert all(len(window) == SEQ_LEN + 1 for window in windows(most))


def test_a_shard_that_is_larger_than_others_take_is_refused(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.trainer.corpus.MAX_SHARD_BYTES", 40 * (SEQ_LEN + 1))
    assert len(windows(corpus.make_shard(40, SEQ_LEN))) == 40
    with pytest.raises(OperatorError, match="evaluation shard has 2,665 bytes") as caught:
        corpus.make_shard(41, SEQ_LEN)
    assert caught.value.code == "E204"
    assert caught.value.fix == "set evaluation.sequences to 40 or fewer"


def test_the_same_passage_is_cut_the_same_wherever_it_stands(tmp_path: Path):
    body = PROSE[:60_000]
    (tmp_path / "a.txt").write_text(body)
    (tmp_path / "b.txt").write_text("Something else before.\n\n" + body + "\n\nAnd after.")
    a, b = (set(collect(text(tmp_path / f"{n}.txt"), tmp_path / "cache")) for n in "ab")
    assert len(a & b) >= len(a) - 2


def test_folders_are_read_in_order_without_what_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(plain_text, "TOLD", 9)
    root = tmp_path / "root"
    (root / "deep").mkdir(parents=True)
    (root / "deep" / "one.md").write_text("First file. " * 9)
    (root / "two.txt").write_text("Second file. " * 9)
    (root / "picture.png").write_bytes(b"\x89PNG\0\xff")
    (root / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (root / ".hidden").write_text("Hidden file.")
    (root / "empty.txt").touch()
    (root / "gone.txt").symlink_to("/a/disk/that/is/not/mounted.txt")
    os.mkfifo(root / "pipe")
    (root / ".ssh").mkdir()
    (root / ".ssh" / "id_ed25519").write_text("A private key. " * 9)
    seen, told = [], []
    found = collect(
        text(root), tmp_path / "cache", lambda *progress: seen.append(progress), told.append
    )
    assert [d[:10] for d in found] == [b"First file", b"Second fil"]
    assert seen == [(1, 2), (2, 2)]
    (left_out,) = told
    assert "picture.png" in left_out
    assert "latin.txt (it is not UTF-8" in left_out
    assert "gone.txt (a link to what is not there)" in left_out
    assert "pipe (it is a pipe" in left_out
    assert "empty" not in left_out


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "text" / "shut").mkdir(parents=True)
    (tmp_path / "text" / "one.txt").write_text("Text. " * 9)
    monkeypatch.setattr(plain_text.os, "access", lambda path, mode: path.name != "shut")
    told = []
    plain_text.text_files(str(tmp_path / "text"), told.append)
    assert "shut (a folder" in told[0]


def test_json_lines_are_told_of_as_they_would_be_trained_on(tmp_path: Path):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "plain.txt").write_text("Text. " * 9)
    told: list[str] = []
    plain_text.text_files(str(folder), told.append)
    assert not told
    for name in ("a.jsonl", "b.ndjson", "c.JSONL", "d.jsonl"):
        (folder / name).write_text('{"text": "Text."}\n' * 9)
    assert len(plain_text.text_files(str(folder), told.append)) == 5
    one = folder / "b.ndjson"
    assert plain_text.text_files(str(one), told.append) == [one]
    all_of_them, by_itself = told
    named = ", ".join(str(folder / name) for name in ("a.jsonl", "b.ndjson", "c.JSONL"))
    assert f"{named} and 1 more as they are" in all_of_them
    assert f"{one} as it is" in by_itself
    for line in told:
        assert "node data prepare" in line
        assert "datasets:json?files=" in line


def test_looking_through_a_large_folder_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("Text.")
    monkeypatch.setattr("node.headway.FIRST_S", 0.0)
    told: list[str] = []
    assert len(plain_text.text_files(str(tmp_path), told.append)) == 3
    assert told[0].startswith("looks for text: ")
    assert "of 4 files" in told[0]


def test_text_without_blank_lines_is_still_cut(tmp_path: Path):
    (tmp_path / "log.txt").write_text("".join(f"line {i} of a log\n" for i in range(20_000)))
    found = collect(text(tmp_path / "log.txt"), tmp_path / "cache")
    assert found.documents > 5
    assert max(map(len, found)) < 2 * plain_text.CHUNK_LIMIT


def test_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = tmp_path / "package"
    (root / "tests").mkdir(parents=True)
    prose = "This is the documentation of a thing that is in the package and has words to read. "
    (root / "a.py").write_text(f'"""{prose * 3}"""\ndef f():\n    r"""Short."""\n')
    (root / "b.py").write_text(f'class C:\n    async def g(self):\n        """{prose * 4}"""\n')
    (root / "copy.py").write_text(f'"""{prose * 3}"""\n')
    (root / "numbers.py").write_text(f'"""{"0 1 2 3 " * 99}"""\n')
    (root / "german.py").write_text(f'"""{"Das ist eine Beschreibung von Dingen. " * 9}"""\n')
    (root / "broken.py").write_text("def (:\n")
    (root / "escape.py").write_text('x = "\\d"\n')  # a SyntaxWarning that is not ours
    (root / "tests" / "t.py").write_text(f'"""Of tests. {prose * 3}"""\n')
    monkeypatch.setattr(plain_text, "source_roots", lambda: [root])
    seen = []
    found = collect(Data(), tmp_path / "cache", lambda *progress: seen.append(progress))
    assert list(found) == [(prose * 3).encode(), (prose * 4).encode()]
    assert seen[-1][0] == seen[-1][1]


def test_the_library_of_this_python_has_docstrings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (standard, *packages) = plain_text.source_roots()
    assert [root.name for root in packages] == ["networkx"]
    monkeypatch.setattr(plain_text, "source_roots", lambda: [standard / "asyncio"])
    found = collect(Data(), tmp_path)
    assert found.documents > 20
    assert all(len(d.decode()) >= plain_text.MIN_DOCSTRING for d in found)


# -- the cache


def test_the_cache_is_used_and_checked(text_file: Path, tmp_path: Path):
    first = collect(text(text_file), tmp_path)
    built = first.path.stat().st_mtime_ns
    assert json.loads(first.path.with_suffix(".json").read_text())["blake3"] == first.digest
    assert collect(text(text_file), tmp_path) == first
    assert first.path.stat().st_mtime_ns == built
    content = bytearray(first.path.read_bytes())
    content[100] ^= 1
    first.path.write_bytes(content)
    assert collect(text(text_file), tmp_path) == first  # built again
    assert first.path.read_bytes()[100] == content[100] ^ 1
    first.path.with_suffix(".json").write_text("{}")
    assert collect(text(text_file), tmp_path) == first


def test_other_text_is_another_corpus(tmp_path: Path):
    file = tmp_path / "a.txt"
    file.write_text("Some text.\n")
    first = collect(text(file), tmp_path / "cache")
    file.write_text("Some other text.\n")
    assert collect(text(file), tmp_path / "cache").path != first.path


def test_a_build_that_fails_leaves_nothing(text_file: Path, tmp_path: Path):
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect(text(text_file), tmp_path, fail)
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
    assert collect(text(text_file), tmp_path).documents


def _killed_while_it_builds(path: Path, folder: Path) -> None:
    collect(text(path), folder, lambda done, total: os.kill(os.getpid(), signal.SIGKILL))


def test_what_a_build_that_was_killed_has_left_goes(text_file: Path, tmp_path: Path):
    killed = multiprocessing.get_context("spawn").Process(
        target=_killed_while_it_builds, args=(text_file, tmp_path)
    )
    killed.start()
    killed.join()
    left = list(tmp_path.glob(f"{DRAFT}*"))
    assert len(left) == 1
    with replacing(tmp_path / "other"):  # of a process that goes on
        assert collect(text(text_file), tmp_path).documents
        there = set(tmp_path.glob(f"{DRAFT}*"))
        assert len(there) == 1
        assert there.isdisjoint(left)
    assert (tmp_path / "other").exists()


def _collect_elsewhere(path: Path, folder: Path) -> tuple[str, bool]:
    built: list[int] = []
    found = collect(text(path), folder, lambda done, total: built.append(done))
    return found.digest, bool(built)


def test_of_several_processes_one_builds(text_file: Path, tmp_path: Path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        results = pool.starmap(_collect_elsewhere, [(text_file, tmp_path)] * 3)
    assert len({digest for digest, _ in results}) == 1
    assert [built for _, built in results].count(True) == 1


def test_the_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "atoll"
    for ignored in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == Path.home() / ".cache" / "atoll"

    def unknown():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", unknown)
    with pytest.raises(OperatorError, match="home directory") as caught:
        cache_folder()
    assert caught.value.code == "E601"
    assert "XDG_CACHE_HOME" in caught.value.fix


# -- refusals


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"a\0b", "binary"),
        (b"caf\xe9", "UTF-8"),
        (None, "No such"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes | None, why: str):
    file = tmp_path / "input"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(OperatorError, match=why) as caught:
        collect(text(file), tmp_path / "cache")
    assert caught.value.code == "E601"
    assert str(file) in caught.value.what
    assert "--data" in caught.value.fix


@pytest.mark.parametrize("before", [100_000, 2**16 - 1, 2**16 + 2**20 - 1])
@pytest.mark.parametrize(("broken", "at"), [(b"\xe9 ", 0), (b"\xc3\xa9\xc3", 2)])
def test_text_is_checked_to_its_end(tmp_path: Path, before: int, broken: bytes, at: int):
    """Also where a character lies across the pieces that are read."""
    file, good = tmp_path / "text", tmp_path / "good"
    file.write_bytes(b"a" * before + broken)
    good.write_bytes(b"a" * before + "\u00e9".encode())
    with pytest.raises(OperatorError, match=f"UTF-8 .byte {before + at:,}.") as caught:
        collect(text(file), tmp_path / "cache")
    assert caught.value.code == "E601"
    assert plain_text.text_files(str(tmp_path)) == [good]


def test_a_path_with_a_colon_is_one_path_where_it_is_there(tmp_path: Path):
    whole = tmp_path / "2026-01-01T10:00"
    whole.mkdir()
    (whole / "a.txt").write_text("Some text.")
    assert plain_text.text_files(str(whole)) == [whole / "a.txt"]
    assert plain_text.text_files(str(whole / "a.txt")) == [whole / "a.txt"]
    (tmp_path / "b.txt").write_text("More text.")
    two = os.pathsep.join([str(tmp_path / "b.txt"), str(tmp_path / "b.txt")])
    assert plain_text.text_files(two) == [tmp_path / "b.txt"] * 2


def test_no_path_and_an_empty_folder_are_refused(tmp_path: Path):
    for data in (Data(recipe="text"), text(tmp_path)):
        with pytest.raises(OperatorError, match="no readable") as caught:
            collect(data, tmp_path / "cache")
        assert caught.value.code == "E601"


def test_sources_without_docstrings_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plain_text, "source_roots", lambda: [tmp_path])
    with pytest.raises(OperatorError, match="has usable text"):
        collect(Data(), tmp_path / "cache")


def test_too_little_text_is_refused(tmp_path: Path):
    file = tmp_path / "short.txt"
    file.write_text("A short text.\n")
    short = collect(text(file), tmp_path / "cache")
    with pytest.raises(OperatorError, match="one sequence needs 65") as caught:
        short.make_shard(4, SEQ_LEN)
    assert caught.value.code == "E601"
    assert f"{file} has 14 bytes in 1 document, which" in caught.value.why
    with pytest.raises(OperatorError, match="two sequences need 128") as caught:
        short.training_file(b"x" * 65, SEQ_LEN)
    assert str(file) in caught.value.why
    assert "cache" not in caught.value.why.removeprefix(str(file))


def test_a_folder_that_cannot_be_written_is_named(text_file: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OperatorError, match=r"Not a directory|File exists") as caught:
        collect(text(text_file), tmp_path / "file" / "cache")
    assert caught.value.code == "E601"
    assert "XDG_CACHE_HOME" in caught.value.fix


def test_text_that_goes_while_it_is_read_is_not_taken_for_the_cache(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def gone(file: Path):
        yield b"a document"
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(plain_text, "text_file_documents", gone)
    with pytest.raises(OperatorError, match="cannot read the training text") as caught:
        collect(text(text_file), tmp_path)
    assert (caught.value.code, caught.value.why) == ("E601", "Input/output error")


def test_a_full_disk_is_named(text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cached_file.os, "replace", full)
    with pytest.raises(OperatorError, match="No space left") as caught:
        collect(text(text_file), tmp_path)
    assert caught.value.code == "E402"
    assert {path.suffix for path in tmp_path.iterdir()} == {".lock"}
