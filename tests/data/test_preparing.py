"""What ``node data prepare`` is given, and where: inputs as people have them, folders in use."""

import codecs
import os
from pathlib import Path

import pytest
from data_kit import TEXTS, folder, json_lines

from bootstrap.manifest import Manifest
from node.data import documents, plain_text
from node.data.prepare import prepare
from node.data.remote import Folder
from node.data.supply import Given, make
from node.data.tokenizer import ByteTokenizer, FileTokenizer
from protocols.errors import OperatorError

BYTES = ByteTokenizer()


def texts_of(path: Path) -> list[str]:
    source = documents.Input(str(path), path.stat().st_size)
    return [document.text.decode() for document in documents.read(source, "text")]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_byte_order_mark_is_no_text(tmp_path, line_end):
    body = "\n\n".join(TEXTS[:20])
    (tmp_path / "plain.txt").write_text(body, newline="\n")
    (tmp_path / "marked.txt").write_text(body, encoding="utf-8-sig", newline=line_end)
    assert texts_of(tmp_path / "marked.txt") == texts_of(tmp_path / "plain.txt")
    (tmp_path / "mark.txt").write_bytes(codecs.BOM_UTF8)
    assert plain_text.text_problem(tmp_path / "mark.txt") == plain_text.EMPTY


@pytest.mark.parametrize("blank", [70_000, 2**16, 2**16 + 2**20 + 9])
def test_text_behind_many_blank_lines_is_text(tmp_path: Path, blank: int):
    (tmp_path / "late.txt").write_text("\n" * blank + "All of the text is here. " * 9)
    (tmp_path / "never.txt").write_text("\n" * blank)
    told: list[str] = []
    assert plain_text.text_files(str(tmp_path), told.append) == [tmp_path / "late.txt"]
    assert not told
    assert [d.strip() for d in texts_of(tmp_path / "late.txt") if d] == [
        ("All of the text is here. " * 9).strip()
    ]
    assert plain_text.text_problem(tmp_path / "never.txt") == plain_text.EMPTY


def test_names_in_capitals_mean_the_same(tmp_path):
    json_lines(tmp_path / "A.JSONL", TEXTS[:20])
    (found,) = documents.find_inputs([str(tmp_path)])
    assert texts_of(Path(found.name)) == TEXTS[:20]


def test_a_pipe_is_refused_and_not_read_in_part():
    reader, writer = os.pipe()
    os.write(writer, "\n\n".join(TEXTS)[:60_000].encode())
    os.close(writer)
    try:
        with pytest.raises(OperatorError, match="pipe") as caught:
            texts_of(Path(f"/dev/fd/{reader}"))
    finally:
        os.close(reader)
    assert caught.value.code == "E601"


def test_a_token_folder_is_not_read_as_text(tmp_path):
    made = folder(tmp_path / "text" / "tokens")
    (tmp_path / "text" / "one.txt").write_text("Text. " * 9)
    told = []
    names = [
        Path(i.name).name for i in documents.find_inputs([str(tmp_path / "text")], told.append)
    ]
    assert names == ["one.txt", "tokens.jsonl"]
    assert "tokens (a token folder" in told[0]
    for read in (
        lambda: documents.find_inputs([str(made)]),
        lambda: plain_text.text_files(str(made)),
    ):
        with pytest.raises(OperatorError) as caught:
            read()
        assert caught.value.code == "E601"


def test_a_token_folder_that_is_not_finished_is_told_of(tmp_path):
    def stop(progress):
        raise KeyboardInterrupt

    source, half = json_lines(tmp_path / "a.jsonl"), tmp_path / "half"
    with pytest.raises(KeyboardInterrupt):
        prepare([str(source)], half, BYTES, report=stop)
    for read in (
        lambda: make(Manifest(), str(half), Given(), tmp_path, lambda done, total: None),
        lambda: documents.find_inputs([str(half)]),
        lambda: Folder(str(half)),
    ):
        with pytest.raises(OperatorError, match="half is not finished") as caught:
            read()
        assert (caught.value.code, "again" in caught.value.fix) == ("E603", True)


def test_a_link_to_a_folder_is_named(tmp_path):
    for name in ("text", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "one.txt").write_text("Text. " * 9)
    (tmp_path / "text" / "linked").symlink_to(tmp_path / "more")
    (tmp_path / "all").symlink_to(tmp_path / "text")
    told = []
    assert len(documents.find_inputs([str(tmp_path / "all")], told.append)) == 1
    assert "linked (a link to a folder" in told[0]


def test_two_do_not_write_into_one_folder(tmp_path):
    source, out = str(json_lines(tmp_path / "a.jsonl")), tmp_path / "out"
    met = []

    def another(progress):
        with pytest.raises(OperatorError, match="is being written") as caught:
            prepare([source], out, BYTES, shard_tokens=60_000)
        met.append(caught.value.code)

    prepare([source], out, BYTES, shard_tokens=60_000, report=another)
    assert set(met) == {"E603"}
    assert Folder(str(out)).index == Folder(str(folder(tmp_path / "alone"))).index


def test_where_there_is_no_text_that_is_what_is_said_whatever_the_folder_is(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ["", ""])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere")
    for out in (tmp_path / "new", tmp_path / "linked"):
        with pytest.raises(OperatorError, match="no text"):
            prepare([str(source)], out, BYTES)
    assert not (tmp_path / "new").exists()
    assert not list((tmp_path / "elsewhere").iterdir())


def tokenizer_of_words(vocabulary: dict[str, int]) -> bytes:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer.to_str().encode()


def test_text_that_a_tokenizer_has_no_token_for_is_named(tmp_path):
    tokenizer = FileTokenizer(tokenizer_of_words({"the": 0, "</s>": 1}))
    source = json_lines(tmp_path / "a.jsonl")
    with pytest.raises(OperatorError, match="UNK") as caught:
        prepare([str(source)], tmp_path / "out", tokenizer)
    assert caught.value.code == "E604"


@pytest.mark.parametrize("vocabulary", [{"</s>": 0}, {"the": 0, "</s>": 1_000_000}])
def test_a_vocabulary_that_no_model_has_is_refused_before_the_work(vocabulary):
    with pytest.raises(OperatorError, match=r"too (few|many) tokens") as caught:
        FileTokenizer(tokenizer_of_words(vocabulary))
    assert caught.value.code == "E604"


def test_a_name_that_begins_like_a_users_home_is_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    json_lines(Path("~draft.jsonl"), TEXTS[:3])
    (found,) = documents.find_inputs(["~draft.jsonl"])
    assert texts_of(Path(found.name)) == TEXTS[:3]


def test_who_is_interrupted_is_told_how_to_go_on(command, tmp_path, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    json_lines(tmp_path / "a.jsonl", TEXTS)
    arguments = ("data", "prepare", tmp_path / "a.jsonl", "--out", tmp_path / "tokens")
    with monkeypatch.context() as patched:
        patched.setattr(ByteTokenizer, "encode", interrupted)
        status, out, err = command(*arguments)
    assert (status, out) == (130, "")
    assert "give the same command again: it goes on" in err
    assert command(*arguments)[0] == 0
