"""`bertopt bulk`: the answers to a file of texts, in parts, exactly one row for each row read.

A part is written under another name and renamed, so that what stands is whole: after an interruption the same call goes on
with the part that is missing. What it does not notice: an input that was changed without its size or time changing.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bertopt import ray, stages
from bertopt._version import __version__
from bertopt.errors import UsageError
from bertopt.runtime.load import load
from bertopt.runtime.tokenization import Text
from bertopt.system import atomic_write

PART_ROWS = 10_000
STATE = "bulk.json"
_FORMATS = (".jsonl", ".csv", ".parquet")
#: The longest field of a CSV file; Python's own limit is 128 KiB.
_FIELD = 1 << 27

Row = dict[str, Any]


@dataclass(frozen=True)
class _Part:
    """Rows that become one file; `end` counts the rows up to the last of them."""

    path: Path
    rows: list[Row]
    texts: list[Text]
    end: int


def bulk(
    source: Path, out: Path, artefact: Path, column: str = "text", pair: str | None = None, part_rows: int = PART_ROWS,
    threads: int | None = None, progress: Callable[[int], None] | None = None, actors: int = 0,
) -> int:  # fmt: skip
    """Answer the texts of `column` (with `pair`, pairs of two columns) of a .jsonl, .csv or .parquet file; return the rows.

    Writes `out/part-00000.…` in the input's format: the row as it was read and `embedding` or `answer`. Parts that are there
    are kept if input, artefact and options are the same; UsageError otherwise. `progress` is called with the rows done.
    With `actors`, as many of Ray's answer, of one thread each or `threads`; else this process does.
    """
    if source.suffix not in _FORMATS:
        raise UsageError(f"the input must end in one of {', '.join(_FORMATS)}; got '{source.name}'")
    if part_rows < 1:
        raise UsageError(f"a part must have at least 1 row; got {part_rows}")
    manifest, stat = stages.verify(artefact), source.stat()
    wanted = {
        "bertopt_version": __version__, "artefact_sha256": manifest.content_sha256, "input_bytes": stat.st_size,
        "input_modified_ns": stat.st_mtime_ns, "column": column, "pair": pair, "part_rows": part_rows,
    }  # fmt: skip
    _check_state(out, wanted)
    key = "embedding" if manifest.spec.task == "feature-extraction" else "answer"
    done = 0

    def missing() -> Iterator[_Part]:
        nonlocal done
        rows = _rows(source)
        for number in count():
            part = list(islice(rows, part_rows))
            if not part:
                return
            if any(key in row for row in part):
                raise UsageError(f"the input has a column '{key}' already, which the answers would replace; name it otherwise")
            path, start, done = out / f"part-{number:05d}{source.suffix}", done, done + len(part)
            if not path.exists():
                yield _Part(path, part, [_text(row, column, pair, start + i) for i, row in enumerate(part)], done)
            elif progress is not None:
                progress(done)

    answered = ray.answers(missing(), artefact, actors, threads or 1) if actors else _answers(missing(), artefact, threads)
    for part, values in answered:
        _write(part.path, [{**row, key: _plain(value)} for row, value in zip(part.rows, values, strict=True)])
        if progress is not None:
            progress(part.end)
    atomic_write.write(out / STATE, json.dumps({**wanted, "rows": done, "complete": True}, indent=2) + "\n")
    return done


def _answers(parts: Iterable[_Part], artefact: Path, threads: int | None) -> Iterator[tuple[_Part, Any]]:
    """Yield each part with its answers. The artefact is opened for the first one."""
    predictor = None
    for part in parts:
        predictor = predictor or load(artefact, threads=threads)
        yield part, predictor(part.texts)


def _check_state(out: Path, wanted: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    path = out / STATE
    if path.is_file():
        try:
            there = dict(json.loads(path.read_text("utf-8")))
        except (ValueError, TypeError) as error:
            raise UsageError(f"'{path}' cannot be read ({error}); give another directory, or remove '{out}'") from error
        other = [name for name, value in wanted.items() if there.get(name) != value]
        if other and not any(out.glob("part-*")):
            # That call stopped at its first part, often by a bad row of an input that was mended since.
            atomic_write.write(path, json.dumps({**wanted, "complete": False}, indent=2) + "\n")
        elif other:
            raise UsageError(f"'{out}' holds parts of another call ({', '.join(other)} differ); give another directory, or remove it")
    elif any(out.iterdir()):
        raise UsageError(f"'{out}' is not empty and holds no {STATE}; give another directory")
    else:
        atomic_write.write(path, json.dumps({**wanted, "complete": False}, indent=2) + "\n")


def _text(row: Row, column: str, pair: str | None, number: int) -> Text:
    found = []
    for name in (column,) if pair is None else (column, pair):
        if name not in row:
            raise UsageError(f"row {number} has no column '{name}'; it has {', '.join(map(str, row))}")
        if not isinstance(row[name], str):
            raise UsageError(f"row {number}: column '{name}' must be a text; got {type(row[name]).__name__}")
        if not _encodes(row[name]):
            raise UsageError(f"row {number}: column '{name}' has half a surrogate pair (\\ud800 to \\udfff), which is no character; write the character itself")
        found.append(row[name])
    return found[0] if pair is None else (found[0], found[1])


def _rows(source: Path) -> Iterator[Row]:
    """Yield the rows of a file. Raises UsageError, when it gets there, for what is not UTF-8, CSV or JSON Lines."""
    if source.suffix == ".parquet":
        for batch in _parquet().ParquetFile(source).iter_batches():
            yield from batch.to_pylist()
        return
    # Spreadsheets begin their UTF-8 with a mark, which is no part of the first column's name.
    with source.open(encoding="utf-8-sig", newline="" if source.suffix == ".csv" else None) as file:
        try:
            yield from (_csv_rows if source.suffix == ".csv" else _json_rows)(source, file)
        except UnicodeDecodeError as error:
            raise UsageError(f"'{source}' must be UTF-8; got a byte {error.object[error.start]:#04x} that is not: save it as UTF-8") from error


def _csv_rows(source: Path, file: TextIO) -> Iterator[Row]:
    before = csv.field_size_limit(_FIELD)
    reader = csv.DictReader(file)
    try:
        names = list(reader.fieldnames or ())
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"'{source}' has several columns '{twice}', of which one would remain; name each otherwise")
        for number, row in enumerate(reader):
            if None in row:
                raise UsageError(f"'{source}', row {number} has more fields than the header; quote texts with commas")
            yield row
    except csv.Error as error:
        raise UsageError(f"'{source}', line {reader.line_num} is not CSV ({error}); check its quotes, or give JSON Lines") from error
    finally:
        csv.field_size_limit(before)


def _json_rows(source: Path, file: TextIO) -> Iterator[Row]:
    for number, line in enumerate(file):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"'{source}', line {number + 1} is not JSON ({error}); expected one object on each line") from error
        if not isinstance(row, dict):
            raise UsageError(f"'{source}', line {number + 1} must be a JSON object; got {type(row).__name__}")
        yield row


def _write(path: Path, rows: list[Row]) -> None:
    with atomic_write.replacing(path) as new:
        if path.suffix == ".parquet":
            import pyarrow

            _parquet().write_table(pyarrow.Table.from_pylist(rows), new)
            return
        with new.open("w", encoding="utf-8", newline="") as file:
            file.writelines(_lines(rows)) if path.suffix == ".jsonl" else _write_csv(file, rows)


def _lines(rows: list[Row]) -> Iterable[str]:
    for row in rows:
        line = json.dumps(row, ensure_ascii=False)
        # Half a surrogate pair in another column stays the escape that it was.
        yield (line if _encodes(line) else json.dumps(row)) + "\n"


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _write_csv(file: Any, rows: list[Row]) -> None:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    for row in rows:
        writer.writerow({name: value if isinstance(value, str) or value is None else json.dumps(value) for name, value in row.items()})


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _parquet() -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError("Parquet needs pyarrow; pip install pyarrow, or give JSON Lines or CSV") from error
    return parquet
