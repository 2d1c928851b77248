"""`bertopt bulk`: one row out for each row in, and nothing computed twice."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import os
import pickle
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import bertopt
import bertopt.ray
from bertopt import stages
from bertopt.commands import bulk as command
from bertopt.commands import bulk_files
from bertopt.errors import IntegrityError, Unsupported, UsageError, WrongAnswer
from bertopt.runtime.answer_options import AnswerOptions
from bertopt.stages import signature
from tests.support.artefacts import write_artefact, write_prompted_artefact
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def artefact(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path_factory.mktemp("bulk") / "artefact")


TEXTS = [f"{'the cat sat on ' * (i % 5)}a mat {i}" for i in range(25)]


def jsonl(folder: Path) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return path


def read(out: Path) -> Iterator[dict[str, Any]]:
    for part in sorted(out.glob("part-*.jsonl")):
        yield from map(json.loads, part.read_text().splitlines())


def test_every_row_comes_out_once_in_order_with_the_predictor_s_answer(artefact: Path, tmp_path: Path) -> None:
    done: list[int] = []
    assert command.bulk(jsonl(tmp_path), tmp_path / "out", artefact, part_rows=10, progress=done.append).rows == 25
    rows = list(read(tmp_path / "out"))
    assert [row["id"] for row in rows] == list(range(25)) and done == [10, 20, 25]
    expected = bertopt.load(artefact)(TEXTS)
    assert np.abs(np.array([row["embedding"] for row in rows]) - expected).max() < 1e-6


@pytest.mark.parametrize("name", ["in.jsonl", "in.csv"])
def test_embeddings_are_written_in_the_fewest_digits_of_a_float32(artefact: Path, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('{"text": "a cat"}\n' if name == "in.jsonl" else "text\na cat\n")
    command.bulk(tmp_path / name, tmp_path / "out", artefact)
    written = next((tmp_path / "out").glob("part-*")).read_text()
    expected = bertopt.load(artefact)(["a cat"])[0]
    assert f"[{', '.join(map(str, expected))}]" in written
    assert np.array_equal(np.array(json.loads(written[written.rindex("[") : written.rindex("]") + 1]), np.float32), expected)


def test_a_prompt_is_put_before_every_text(tiny: Tiny, tmp_path: Path) -> None:
    artefact = write_prompted_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "prompted", query="the cat: ")
    source, out = jsonl(tmp_path), tmp_path / "out"
    with pytest.raises(UsageError, match="no prompt 'passage'; its prompts are 'query'"):
        command.bulk(source, out, artefact, options=AnswerOptions(prompt_name="passage"))
    with pytest.raises(UsageError, match="leave prompt_name out"):
        command.bulk(source, out, artefact, pair="text", options=AnswerOptions(prompt_name="query"))
    assert not out.exists()
    assert command.bulk(source, out, artefact, part_rows=10, options=AnswerOptions(prompt_name="query")).rows == 25
    rows = list(read(out))
    assert [row["text"] for row in rows] == TEXTS
    predict = bertopt.load(artefact)
    expected = np.concatenate([predict([f"the cat: {text}" for text in TEXTS[start : start + 10]]) for start in (0, 10, 20)])
    assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), expected)
    with pytest.raises(UsageError, match=r"parts of another call \(prompt_name differ"):
        command.bulk(source, out, artefact, part_rows=10)


def test_with_a_key_only_a_signed_artefact_answers(tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    artefact = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "artefact")
    private, source, out = signature.new_key(tmp_path / "release.key"), jsonl(tmp_path), tmp_path / "out"
    public = Path(f"{private}.pub")
    with pytest.raises(IntegrityError, match="is not signed"):
        command.bulk(source, out, artefact, public_key=public)
    assert not out.exists()
    stages.sign(artefact, private)
    assert command.bulk(source, out, artefact, public_key=public).rows == 25


def test_an_interrupted_call_goes_on_with_the_part_that_is_missing(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = jsonl(tmp_path), tmp_path / "out"
    write, written = bulk_files.write, []

    def dying(path: Path, *others: Any) -> None:
        if path.name == "part-00001.jsonl" and not written:
            written.append(path)
            raise KeyboardInterrupt
        write(path, *others)

    monkeypatch.setattr(bulk_files, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        command.bulk(source, out, artefact, part_rows=10)
    first = (out / "part-00000.jsonl").stat().st_mtime_ns
    assert command.bulk(source, out, artefact, part_rows=10).rows == 25
    assert (out / "part-00000.jsonl").stat().st_mtime_ns == first
    assert [row["id"] for row in read(out)] == list(range(25))
    assert json.loads((out / "bulk.json").read_text())["complete"] is True


@pytest.mark.parametrize("change", ["truncated", "altered", "emptied"])
@pytest.mark.parametrize("complete", [True, False])
def test_a_finished_part_that_was_changed_is_not_kept(change: str, complete: bool, artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, write = jsonl(tmp_path), tmp_path / "out", bulk_files.write

    def stopping(path: Path, *others: Any) -> None:
        if not complete and path.name == "part-00002.jsonl":
            raise KeyboardInterrupt
        write(path, *others)

    monkeypatch.setattr(bulk_files, "write", stopping)
    with pytest.raises(KeyboardInterrupt) if not complete else nullcontext():
        command.bulk(source, out, artefact, part_rows=10)
    monkeypatch.undo()
    part = out / "part-00001.jsonl"
    content = part.read_bytes()
    changed = {"truncated": content[:-7], "altered": content.replace(b'"id": 1', b'"id": 7', 1), "emptied": b""}[change]
    part.write_bytes(changed)
    with pytest.raises(IntegrityError, match=r"part-00001\.jsonl' is not as it was written .*move or remove it to have its rows answered again, or give another directory"):
        command.bulk(source, out, artefact, part_rows=10)
    assert part.read_bytes() == changed, "whoever changed it may want it"
    part.unlink()
    assert command.bulk(source, out, artefact, part_rows=10).rows == 25
    assert part.read_bytes() == content and [row["id"] for row in read(out)] == list(range(25))


def test_a_part_that_no_record_has_is_written_again(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between a part and its record leaves one."""
    source, out, record = jsonl(tmp_path), tmp_path / "out", command._write_state

    def dying(*arguments: Any, parts: Any, **more: Any) -> None:
        if len(parts) == 2:
            raise KeyboardInterrupt
        record(*arguments, parts=parts, **more)

    monkeypatch.setattr(command, "_write_state", dying)
    with pytest.raises(KeyboardInterrupt):
        command.bulk(source, out, artefact, part_rows=10)
    monkeypatch.undo()
    first = (out / "part-00000.jsonl").stat().st_mtime_ns
    (out / "part-00001.jsonl").write_text("of somebody who saw it there\n")
    done: list[int] = []
    assert command.bulk(source, out, artefact, part_rows=10, progress=done.append).rows == 25
    assert [row["id"] for row in read(out)] == list(range(25)) and done == [10, 20, 25]
    assert (out / "part-00000.jsonl").stat().st_mtime_ns == first


@pytest.mark.parametrize("change", ["grows", "shrinks"])
def test_an_input_that_changes_during_the_call_is_refused(artefact: Path, tmp_path: Path, change: str) -> None:
    source, out = jsonl(tmp_path), tmp_path / "out"
    lines = source.read_text().splitlines(keepends=True)

    def changing(rows: int) -> None:
        if rows == 10:
            source.write_text("".join(lines + lines if change == "grows" else lines[:20]))

    with pytest.raises(UsageError, match="its size or time changed during the call"):
        command.bulk(source, out, artefact, part_rows=10, progress=changing)
    assert [row["id"] for row in read(out)] == list(range(10))
    assert json.loads((out / "bulk.json").read_text())["complete"] is False


def test_parts_of_another_call_are_not_mixed_in(artefact: Path, tmp_path: Path) -> None:
    source, out = jsonl(tmp_path), tmp_path / "out"
    command.bulk(source, out, artefact, part_rows=10)
    with pytest.raises(UsageError, match="part_rows differ"):
        command.bulk(source, out, artefact, part_rows=5)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x")
    with pytest.raises(UsageError, match="is not empty"):
        command.bulk(source, tmp_path / "full", artefact)
    assert [one.name for one in (tmp_path / "full").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_second_texts_of_the_usual_name_make_pairs(form: str, tiny: Tiny, tmp_path: Path) -> None:
    """Scored without them, a re-ranker's answers would be wrong and look right."""
    artefact = write_artefact(tiny("bert"), tmp_path / "artifact")
    rows = [{"text": "a cat", "text_pair": "the dog sat"}, {"text": "a cat", "text_pair": "a good film"}]
    source = tmp_path / f"in.{form}"
    if form == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        importlib.import_module("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), source)
    elif form == "csv":
        source.write_text("text,text_pair\n" + "".join(f"{row['text']},{row['text_pair']}\n" for row in rows))
    else:
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert command.bulk(source, tmp_path / "out", artefact).rows == 2
    assert json.loads((tmp_path / "out" / command.STATE).read_text())["pair"] == "text_pair"
    if form == "jsonl":
        got = [json.loads(line)["answer"] for line in (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()]
        expected = bertopt.load(artefact)([(row["text"], row["text_pair"]) for row in rows])
        assert [answer["score"] for answer in got] == pytest.approx([answer["score"] for answer in expected])


def test_a_second_text_that_the_first_row_has_not_is_not_left_out(tiny: Tiny, tmp_path: Path) -> None:
    artefact = write_artefact(tiny("bert"), tmp_path / "artifact")
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "a cat"}\n{"text": "a cat", "text_pair": "a good film"}\n')
    with pytest.raises(UsageError, match=r"in.jsonl:2: a column 'text_pair', but the first row has none"):
        command.bulk(source, tmp_path / "out", artefact)
    # Whoever names another column means that alone.
    source.write_text('{"a": "a cat"}\n{"a": "a cat", "text_pair": "a good film"}\n')
    assert command.bulk(source, tmp_path / "out", artefact, column="a").rows == 2


def test_csv_keeps_its_columns(artefact: Path, tmp_path: Path) -> None:
    with (tmp_path / "in.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["name", "body"], ["one", 'a "cat", sat\non it'], ["two", "the dog"]])
    assert command.bulk(tmp_path / "in.csv", tmp_path / "out", artefact, column="body").rows == 2
    with (tmp_path / "out" / "part-00000.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["one", "two"] and rows[0]["body"] == 'a "cat", sat\non it'
    assert len(json.loads(rows[1]["embedding"])) == 32


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", "expected a column 'text'; got none: name columns with --column"), ('{"text": null}', "column 'text' must be a text; got nothing"),
        ("[1]", "expected a JSON object; got list"), ("{", "expected a JSON object; got no JSON"),
    ],
)
def test_a_bad_row_is_named(line: str, words: str, artefact: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    with pytest.raises(UsageError, match=f"{tmp_path}/in.jsonl:3: {words}"):
        command.bulk(tmp_path / "in.jsonl", tmp_path / "out", artefact)


@pytest.mark.parametrize(("name", "content"), [("in.csv", "text,id\na cat,1\n"), ("in.jsonl", '{"text": "a cat", "id": 1}\n')])
def test_a_byte_order_mark_is_no_part_of_a_name(name: str, content: str, artefact: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content, "utf-8-sig")
    assert command.bulk(tmp_path / name, tmp_path / "out", artefact).rows == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("in.csv", b"text\nna\xefve\n", r"in\.csv:2: expected UTF-8; got a byte 0xef"),
        ("in.jsonl", b'{"text": "\xc3\xa9"}\n' * 9000 + b'{"text": "na\xefve"}\n', r"in\.jsonl:9001: expected UTF-8; got a byte 0xef"),
        ("in.csv", b'text\n"a cat\nb\nc\n', r"in\.csv:4: expected CSV; got unexpected end of data: check its quotes"),
        ("in.csv", b'"text\na\n', r"in\.csv:2: expected CSV; got unexpected end of data: check its quotes"),
        ("in.csv", b'text\n"a cat\nb\n"c"\n', r"in\.csv:4: expected CSV; got ',' expected after"),
        ("in.csv", b"text,text\na,b\n", "several columns 'text'"),
        ("in.csv", b"\ntext\na\n", r"in\.csv:1: expected the names of the columns; got an empty line: remove it"),
        ("in.csv", "text\na cat\n".encode("utf-16-le"), r"in\.csv:2: expected a column 'text'; got t\\x00e\\x00x\\x00t\\x00: name"),
        ("in.jsonl", gzip.compress(b'{"text": "a"}\n', mtime=0), r"in\.jsonl' is gzip; name it in\.jsonl\.gz$"),
        ("in.csv", b"PAR1\x15\x04\x80\xd2", r"in\.csv' is Parquet; name it in\.parquet$"),
        ("in.jsonl", b'[{"text": "a"}]\n', r"in\.jsonl:1: expected a JSON object; got list: write one object on each line"),
        ("in.csv", b"text,embedding\na,b\n", "has a column 'embedding' already"),
        ("in.csv", b"text,id\na,1\n\nb\n\"c\nd\",4,5\n", r"in\.csv:6: expected 2 fields, as in the header; got 3"),
        ("in.csv", b"text,id\n\"a\nb\",1\n", r"in\.csv:3: expected a column 'body'; got text, id"),
        ("in.jsonl", b'{"text": "a", "x": ' + b"[" * 100_000 + b"\n", r"in\.jsonl:1: expected a JSON object; got no JSON"),
        ("in.txt", b"a\n\nb\n", r"in\.txt:2: the line is empty; remove it, or give JSON Lines"),
        ("in.txt", b"a\nna\xefve\n", r"in\.txt:2: expected UTF-8; got a byte 0xef"),
        ("in.txt", "a cat\nthe dog\n".encode("utf-16-le"), r"in\.txt:1: expected UTF-8; got NUL in every other byte, as in UTF-16: save it as UTF-8"),
        ("in.txt", b"a\n", r"in\.txt:1: expected a column 'body'; got text"),
        ("in.txt.gz", gzip.compress(b"a\nna\xefve\n", mtime=0), r"in\.txt\.gz:2: expected UTF-8; got a byte 0xef"),
        ("in.txt.gz", b"a cat\n", r"in\.txt\.gz' cannot be read as gzip \(Not a gzipped file"),
        ("in.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], r"in\.jsonl\.gz' cannot be read as gzip \(Compressed file ended before"),
        ("in.jsonl.gz", gzip.compress(b'{"text": "a"}\n', mtime=0)[:-8] + bytes(8), r"in\.jsonl\.gz' cannot be read as gzip \(CRC check failed"),
        ("in.jsonl.gz", gzip.compress(b"", mtime=0)[:10] + b"\xff" * 20, r"in\.jsonl\.gz' cannot be read as gzip \(Error -3"),
        ("in.parquet.gz", b"", r"must end in one of \.jsonl, \.csv, \.txt, each also with \.gz, or \.parquet; got 'in\.parquet\.gz'"),
        ("in.jsonl", b'{"text": "a"}\n{"text": "a\\ud800"}\n', r"in\.jsonl:2: column 'text' has half a surrogate pair"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(name: str, content: bytes, words: str, artefact: Path, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        command.bulk(tmp_path / name, tmp_path / "out", artefact, column="body" if "'body'" in words else "text")


def test_a_field_that_is_too_long_is_refused(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_files, "_FIELD", 10)
    (tmp_path / "in.csv").write_text("text\n" + "a" * 11 + "\n")
    with pytest.raises(UsageError, match=r"in\.csv:2: expected CSV; got field larger"):
        command.bulk(tmp_path / "in.csv", tmp_path / "out", artefact)


def test_what_other_columns_hold_stays_as_it_was(artefact: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a", "x": "\\ud800é"}\n', "utf-8")
    assert command.bulk(tmp_path / "in.jsonl", tmp_path / "out", artefact).rows == 1
    assert next(read(tmp_path / "out"))["x"] == "\ud800é"


def test_an_input_that_was_mended_after_a_bad_row_may_be_tried_again(artefact: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text('{"text": null}\n')
    with pytest.raises(UsageError, match="must be a text"):
        command.bulk(source, out, artefact)
    assert command.bulk(jsonl(tmp_path), out, artefact).rows == 25
    assert len(list(read(out))) == 25


def test_a_bad_last_row_is_named_before_anything_is_answered(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts before it would be of no use: the mended file is another input."""
    monkeypatch.setattr(command, "load", lambda *_, **__: pytest.fail("nothing is to be answered"))
    source = jsonl(tmp_path)
    source.write_text(source.read_text() + '{"text": null}\n')
    with pytest.raises(UsageError, match=r"in\.jsonl:26: column 'text' must be a text; got nothing"):
        command.bulk(source, tmp_path / "out", artefact, part_rows=10)
    assert not list((tmp_path / "out").glob("part-*"))


@pytest.mark.parametrize("name", ["in.txt", "in.txt.gz", "in.jsonl.gz", "in.csv.gz"])
def test_plain_texts_and_gzip_are_read(name: str, artefact: Path, tmp_path: Path) -> None:
    lines = {"txt": [*TEXTS, ' a "\u2028" é '], "jsonl": [json.dumps({"text": text, "n": 1}) for text in TEXTS], "csv": ["text", *TEXTS]}[name.split(".")[1]]
    content = "\r\n".join(lines).encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content[:50]) + gzip.compress(content[50:]) if name.endswith(".gz") else content)
    rows = command.bulk(tmp_path / name, tmp_path / "out", artefact, part_rows=10).rows
    parts = {part.name: part.read_bytes() for part in sorted((tmp_path / "out").glob("part-*"))}
    texts = lines if "txt" in name else TEXTS
    assert rows == len(texts) and set(parts) == {f"part-{i:05d}.{'csv' if 'csv' in name else 'jsonl'}" for i in range(3)}
    if "csv" not in name:
        written = list(read(tmp_path / "out"))
        assert [row["text"] for row in written] == texts
        assert np.abs(np.array([row["embedding"] for row in written]) - bertopt.load(artefact)(texts)).max() < 1e-6
    (tmp_path / "out" / "part-00001.jsonl").unlink(missing_ok=True)
    assert command.bulk(tmp_path / name, tmp_path / "out", artefact, part_rows=10).rows == rows
    assert {part.name: part.read_bytes() for part in (tmp_path / "out").glob("part-*")} == parts


def test_a_blank_line_is_no_row(artefact: Path, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\n{"text": "a"}\r\n \t\r\n{"text": "b"}\n\n')
    assert command.bulk(tmp_path / "in.jsonl", tmp_path / "out", artefact).rows == 2
    assert [row["text"] for row in read(tmp_path / "out")] == ["a", "b"]


def test_a_row_of_json_is_written_as_it_was_read(artefact: Path, tmp_path: Path) -> None:
    """Python's numbers hold neither all these digits nor this size."""
    lines = ['{"text":"a","x":0.12345678901234567890,"y":1e400,"z":"\\u00e9\\ud800"}', '{ "n" : 1.0, "text": "b" }', '{"text": "c", "d": {}}']
    (tmp_path / "in.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert command.bulk(tmp_path / "in.jsonl", tmp_path / "out", artefact).rows == 3
    written = (tmp_path / "out" / "part-00000.jsonl").read_text().splitlines()
    assert [line.partition(', "embedding": [')[0] for line in written] == [line[:-1].rstrip() for line in lines]
    assert all(len(json.loads(line)["embedding"]) == 32 for line in written)


def test_two_calls_do_not_write_to_one_directory(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out, load = jsonl(tmp_path), tmp_path / "out", command.load
    refused: list[str] = []

    def opened(*arguments: Any, **options: Any) -> Any:
        with pytest.raises(UsageError) as caught:
            command.bulk(source, out, artefact, part_rows=10)
        refused.append(str(caught.value))
        return load(*arguments, **options)

    monkeypatch.setattr(command, "load", opened)
    assert command.bulk(source, out, artefact, part_rows=10).rows == 25
    assert len(refused) == 1 and "another call writes to" in refused[0]
    assert [row["id"] for row in read(out)] == list(range(25))


def test_what_a_killed_call_left_half_written_goes(artefact: Path, tmp_path: Path) -> None:
    """Each kill left a part's file; one in the first moment left a directory that no call took any more."""
    source, out = jsonl(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / ".bulk.json.7.tmp").write_text("{")
    assert command.bulk(source, out, artefact, part_rows=10).rows == 25
    (out / "part-00001.jsonl").rename(out / ".part-00001.jsonl.7.tmp")
    assert command.bulk(source, out, artefact, part_rows=10).rows == 25
    assert sorted(one.name for one in out.iterdir()) == [".bulk.lock", "bulk.json", *(f"part-0000{i}.jsonl" for i in range(3))]


def test_an_artefact_that_is_replaced_before_it_is_opened_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows are checked first, which takes minutes where they are many; an export may deliver another model until then."""
    first, load = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "artefact", "eager"), command.load

    def replaced(*arguments: Any, **options: Any) -> Any:
        shutil.rmtree(first)
        write_artefact(tiny(task="feature-extraction", pooling="mean", seed=1), first, "eager")
        return load(*arguments, **options)

    monkeypatch.setattr(command, "load", replaced)
    with pytest.raises(UsageError, match=r"artefact' was replaced by another artefact during the call"):
        command.bulk(jsonl(tmp_path), tmp_path / "out", first)
    assert not list((tmp_path / "out").glob("part-*"))


def test_an_answer_that_is_not_finite_is_not_written(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON has no NaN, and no gate lets one pass."""
    right = bertopt.load(artefact)

    def spoilt(texts: list[str], **options: Any) -> Any:
        answer = right.answer(texts, **options)
        answer.values[[text == TEXTS[13] for text in texts]] = np.nan
        return answer

    monkeypatch.setattr(command, "load", lambda *_, **__: SimpleNamespace(answer=spoilt))
    with pytest.raises(WrongAnswer, match=r"in\.jsonl:14: expected a finite embedding; got NaN"):
        command.bulk(jsonl(tmp_path), tmp_path / "out", artefact, part_rows=10)
    assert [part.name for part in (tmp_path / "out").glob("part-*")] == ["part-00000.jsonl"]


def test_a_pipe_is_refused(artefact: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.jsonl")
    with pytest.raises(UsageError, match="write what comes from a pipe to a file"):
        command.bulk(tmp_path / "in.jsonl", tmp_path / "out", artefact)


def test_parquet_keeps_the_types_of_its_columns_in_every_part(artefact: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    table = pyarrow.table({
        "text": pyarrow.array([f"a cat {i}" for i in range(5)]), "late": pyarrow.array([None, None, None, "x", None], pyarrow.string()),
        "small": pyarrow.array([1, None, 3, 4, 5], pyarrow.int8()), "time": pyarrow.array([1, 2, 3, 4, 5], pyarrow.timestamp("ns", "UTC")),
        "kind": pyarrow.array(["a", "b", "a", None, "b"]).dictionary_encode(), "half": pyarrow.array([0.5] * 5, pyarrow.float32()),
    })  # fmt: skip
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=3)
    assert command.bulk(tmp_path / "in.parquet", tmp_path / "out", artefact, part_rows=2).rows == 5
    parts = [parquet.read_table(part) for part in sorted((tmp_path / "out").glob("part-*"))]
    assert [part.num_rows for part in parts] == [2, 2, 1]
    whole = pyarrow.concat_tables(parts)
    assert whole.select(table.column_names) == parquet.read_table(tmp_path / "in.parquet")
    expected = bertopt.load(artefact)(table["text"].to_pylist())
    assert np.abs(np.array(whole["embedding"].to_pylist()) - expected).max() < 1e-6
    assert whole["embedding"].type == pyarrow.list_(pyarrow.float32())
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(UsageError, match="cannot be read as Parquet"):
        command.bulk(tmp_path / "bad.parquet", tmp_path / "other", artefact)
    with pytest.raises(UsageError, match=r"in\.parquet: row 1: expected a column 'body'; got text, late"):
        command.bulk(tmp_path / "in.parquet", tmp_path / "another", artefact, column="body")


@pytest.mark.parametrize("actors", [0, 1])
def test_long_texts_are_split_into_windows_or_counted(actors: int, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray_of_one_process(monkeypatch)
    artefact = write_artefact(tiny(task="question-answering"), tmp_path / "artefact", "eager")
    rows = [{"text": "who sat ?", "text_pair": "the cat sat on a mat , " * count} for count in (1, 30, 2, 40)]
    source, whole = tmp_path / "in.jsonl", AnswerOptions(stride=8)
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs, predict = [(row["text"], row["text_pair"]) for row in rows], bertopt.load(artefact)
    assert command.bulk(source, tmp_path / "cut", artefact, part_rows=2, actors=actors) == command.Answered(4, 2)
    assert command.bulk(source, tmp_path / "whole", artefact, part_rows=2, actors=actors, options=whole) == command.Answered(4, 0)
    for out, stride in (("cut", None), ("whole", 8)):
        got, expected = [row["answer"] for row in read(tmp_path / out)], predict(pairs, stride=stride)
        assert [(one["start"], one["end"]) for one in got] == [(one["start"], one["end"]) for one in expected]
    (tmp_path / "cut" / "part-00001.jsonl").unlink()
    assert command.bulk(source, tmp_path / "cut", artefact, part_rows=2).truncated == 2, "those of a part that is kept count too"
    with pytest.raises(UsageError, match=r"parts of another call \(stride differ\)"):
        command.bulk(source, tmp_path / "whole", artefact, part_rows=2)
    with pytest.raises(UsageError, match="aggregation_strategy goes with token-classification"):
        command.bulk(source, tmp_path / "none", artefact, options=AnswerOptions(aggregation_strategy="simple"))
    assert not (tmp_path / "none").exists()


NONE_FIRST = ["", "", "a cat", ""]


@pytest.mark.parametrize(("kind", "texts"), [
    ("token-classification", NONE_FIRST), ("entities", NONE_FIRST), ("fill-mask", ["a", "cat", "a [MASK]", "[MASK] [MASK]"]), ("tokens", NONE_FIRST),
    ("mean", NONE_FIRST), ("text-classification", NONE_FIRST), ("top_k", NONE_FIRST), ("question-answering", NONE_FIRST),
])  # fmt: skip
def test_parts_of_parquet_are_tables_of_one_type(kind: str, texts: list[str], tiny: Tiny, tmp_path: Path) -> None:
    """Whoever reads them as one table got an error where a part's answers were all empty."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    how = AnswerOptions(aggregation_strategy="simple" if kind == "entities" else "none", top_k=2 if kind == "top_k" else "default")
    task = {"entities": "token-classification", "top_k": "text-classification"}.get(kind, kind if "-" in kind else "feature-extraction")
    artefact = write_artefact(tiny(task=task, pooling="mean" if kind == "mean" else None), tmp_path / "artefact", "eager")
    columns = {"text": texts} | ({"text_pair": ["a mat"] * 4} if task == "question-answering" else {})
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    assert command.bulk(tmp_path / "in.parquet", tmp_path / "out", artefact, part_rows=2, options=how).rows == 4
    tables = [parquet.read_table(part) for part in sorted((tmp_path / "out").glob("part-*"))]
    assert tables[0].schema == tables[1].schema
    asked: list[Any] = [*zip(*columns.values(), strict=True)] if len(columns) > 1 else texts
    predict = bertopt.load(artefact)
    expected = [one for start in (0, 2) for one in predict(asked[start : start + 2], **asdict(how))]
    got = pyarrow.concat_tables(tables)["embedding" if task == "feature-extraction" else "answer"].to_pylist()
    assert got == [one.tolist() if isinstance(one, np.ndarray) else one for one in expected]


def test_parts_of_sparse_embeddings_in_parquet_are_tables_of_one_type(tiny: Tiny, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    spec = stages.verify(write_artefact(tiny("bert", "feature-extraction", "splade"), tmp_path / "artefact", "eager")).spec
    values = [[{"indices": [], "values": []}], [{"indices": [3, 30_000], "values": [0.25, 1.5]}]]
    for number, value in enumerate(values):
        rows = bulk_files.Rows([], pyarrow.table({"text": ["a"]}), range(1, 2))
        bulk_files.write(tmp_path / f"{number}.parquet", rows, "embedding", value, spec)
    tables = [parquet.read_table(tmp_path / f"{number}.parquet") for number in (0, 1)]
    assert tables[0].schema == tables[1].schema
    assert pyarrow.concat_tables(tables)["embedding"].to_pylist() == [*values[0], *values[1]]


def test_a_damaged_record_of_the_call_is_refused(artefact: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "bulk.json").write_text("{")
    with pytest.raises(UsageError, match=r"bulk\.json' cannot be read"):
        command.bulk(jsonl(tmp_path), tmp_path / "out", artefact)


def test_actors_need_ray(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Unsupported, match=r"pip install 'bertopt\[ray\]'"):
        command.bulk(jsonl(tmp_path), tmp_path / "out", artefact, actors=2)


def ray_of_one_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put the contract of Ray's actors in Ray's place; return what was done at its end. `campaigns.ray_bulk` runs them on Ray itself."""
    ray: Any = ModuleType("ray")
    ended: list[str] = []

    class Method:
        def __init__(self, call: Any) -> None:
            self.remote = lambda *arguments: lambda: call(*arguments)

    def remote(**options: Any) -> Any:
        assert options == {"num_cpus": 1, "max_restarts": -1, "max_task_retries": -1}

        def of(cls: Any) -> Any:
            def make(*arguments: Any) -> Any:
                made = cache(lambda: cls(*arguments))
                return SimpleNamespace(answer=Method(lambda texts: made().answer(texts)))

            return SimpleNamespace(remote=make)

        return of

    def get(answer: Any) -> Any:
        try:
            return answer()
        except Exception as error:
            raise RuntimeError(f"RayTaskError: {traceback.format_exc()}") from error

    ray.is_initialized, ray.init, ray.remote = lambda: False, lambda **_: None, remote
    ray.get, ray.shutdown = get, lambda: ended.append("shut down")
    monkeypatch.setitem(sys.modules, "ray", ray)
    return ended


def test_an_actor_that_opens_another_artefact_is_refused(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts an actor again where its process dies; the directory may hold another model by then."""
    directory, load = write_artefact(tiny(task="feature-extraction", pooling="mean"), tmp_path / "artefact", "eager"), bertopt.ray.load
    opened: list[Any] = []

    def replaced(*arguments: Any, **options: Any) -> Any:
        if opened:
            shutil.rmtree(directory)
            write_artefact(tiny(task="feature-extraction", pooling="mean", seed=1), directory, "eager")
        opened.append(load(*arguments, **options))
        return opened[-1]

    ended = ray_of_one_process(monkeypatch)
    monkeypatch.setattr(bertopt.ray, "load", replaced)
    with pytest.raises(UsageError, match=r"artefact' was replaced by another artefact during the call"):
        command.bulk(jsonl(tmp_path), tmp_path / "out", directory, part_rows=3, actors=2)
    assert len(opened) == 2 and ended == ["shut down"]


def test_an_actor_hands_back_what_it_cannot_open(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its machine may not share the directory. It was Ray's traceback and exit code 1, as of a bug."""
    error = IntegrityError("'artefact' must have a manifest.json")

    def refuse(*_: Any, **__: Any) -> Any:
        raise error

    ended = ray_of_one_process(monkeypatch)
    monkeypatch.setattr(bertopt.ray, "load", refuse)
    with pytest.raises(IntegrityError) as caught:
        command.bulk(jsonl(tmp_path), tmp_path / "out", artefact, part_rows=3, actors=2)
    assert caught.value is error and ended == ["shut down"]
    assert str(pickle.loads(pickle.dumps(error))) == str(error), "Ray pickles what an actor gives back"


def test_actors_answer_the_parts_in_order(artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = ray_of_one_process(monkeypatch)
    source, out, done = jsonl(tmp_path), tmp_path / "out", list[int]()
    assert command.bulk(source, out, artefact, part_rows=3, actors=2, progress=done.append).rows == 25
    rows = list(read(out))
    assert [row["id"] for row in rows] == list(range(25)) and done[-1] == 25 and ended == ["shut down"]
    assert np.abs(np.array([row["embedding"] for row in rows]) - bertopt.load(artefact)(TEXTS)).max() < 1e-6
    (out / "part-00004.jsonl").unlink()
    assert command.bulk(source, out, artefact, part_rows=3, actors=2).rows == 25
    assert [row["id"] for row in read(out)] == list(range(25))


def test_questions_without_contexts_are_refused_with_the_options_to_give(tiny: Tiny, tmp_path: Path) -> None:
    answers = write_artefact(tiny(task="question-answering"), tmp_path / "artefact", "eager")
    with pytest.raises(UsageError, match=r"takes a question and a context; the rows have no column 'text_pair': name their columns with --column and --pair"):
        command.bulk(jsonl(tmp_path), tmp_path / "out", answers)
    assert not (tmp_path / "out").exists()
