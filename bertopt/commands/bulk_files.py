"""Files of texts, a part at a time: JSON Lines, CSV, lines of text, each also in gzip, and Parquet.

A row is written as it was read, with one more column; a line of text becomes one of JSON.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from bertopt.errors import UsageError, missing_library
from bertopt.runtime import task_outputs
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.spec import Spec
from bertopt.system import atomic_write
from bertopt.system.untrusted import is_utf16

FORMATS = (".jsonl", ".csv", ".txt", ".parquet")
#: The longest field of a CSV file; Python's own limit is 128 KiB.
_FIELD = 1 << 27
_NAMES = ".jsonl, .csv, .txt, each also with .gz, or .parquet"

Row = dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Some rows, with the columns asked for at least, and the same as `write` takes them: lines of JSON, or a table of Parquet."""

    rows: list[Row]
    read: Any
    numbers: Sequence[int]
    """The line of each row (CSV: its last), or its number in a table, from 1."""


def form(source: Path) -> str:
    """Return which of `FORMATS` a file has, by its name. Raises UsageError for another."""
    name = source.with_suffix("") if source.suffix == ".gz" else source
    if name.suffix not in FORMATS or (source.suffix == ".gz" and name.suffix == ".parquet"):
        raise UsageError(f"the input must end in one of {_NAMES}; got '{source.name}'")
    return name.suffix


def suffix_of_parts(source: Path) -> str:
    """Return how the name of a part ends."""
    return ".jsonl" if form(source) == ".txt" else form(source)


def read(source: Path, columns: Sequence[str], size: int) -> Iterator[Rows]:
    """Yield the rows of a file, `size` at a time. Raises UsageError, when it gets there, for what is not UTF-8, or not what its name says."""
    try:
        if source.suffix == ".parquet":
            done = 0
            for table in _tables(source, size):
                yield Rows(_column_rows(table, columns), table, range(done + 1, done + table.num_rows + 1))
                done += table.num_rows
            return
        # Spreadsheets begin their UTF-8 with a mark, which is no part of the first column's name.
        with _opened(source, "rt", encoding="utf-8-sig", newline="" if form(source) == ".csv" else None) as file:
            rows = {".csv": _csv_rows, ".txt": _text_rows, ".jsonl": _json_rows}[form(source)](source, file)
            while part := list(islice(rows, size)):
                yield Rows([row for row, _, _ in part], [as_read for _, as_read, _ in part], [line for _, _, line in part])
    except UnicodeDecodeError as error:
        _refuse_other(source)
        raise UsageError(f"{_no_utf8(source)}: expected UTF-8; got a byte {error.object[error.start]:#04x} that is not: save it as UTF-8") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"'{source}' cannot be read as gzip ({error}); write it again, or give it unpacked") from error


def _opened(source: Path, mode: str, **text: Any) -> Any:
    return (gzip.open if source.suffix == ".gz" else open)(source, mode, **text)


def place(source: Path, number: int) -> str:
    """Return where a row is, as messages name it."""
    return f"{source}: row {number}" if source.suffix == ".parquet" else f"{source}:{number}"


def columns(source: Path) -> list[str]:
    """Return the names of the columns of a file's first row. Raises UsageError as `read`."""
    first = next(read(source, (), 1), None)
    if first is None:
        return []
    return list(first.read.column_names if source.suffix == ".parquet" else first.rows[0])


def write(path: Path, rows: Rows, key: str, values: Iterable[Any], spec: Spec, options: AnswerOptions = DEFAULTS) -> None:
    """Write `rows` with `values`, a model's answers with `options`, as the column `key`: whole, or not at all."""
    table = partial(_write_table, spec=spec, options=options)
    writers: dict[str, Callable[..., None]] = {".jsonl": _write_json, ".csv": _write_csv, ".parquet": table}
    text: Row = {} if path.suffix == ".parquet" else {"encoding": "utf-8", "newline": ""}
    with atomic_write.replacing(path) as new, new.open("w" if text else "wb", **text) as file:
        writers[path.suffix](file, rows.read, key, list(values))


def _refuse_other(source: Path) -> None:
    """Raise UsageError where a file that is no text is one that another name would let be read."""
    with source.open("rb") as file:
        begin = file.read(4)
    if begin[:2] == b"\x1f\x8b" and source.suffix != ".gz":
        raise UsageError(f"'{source}' is gzip; name it {source.name}.gz")
    if begin == b"PAR1":
        raise UsageError(f"'{source}' is Parquet; name it {source.stem}.parquet")


def _no_utf8(source: Path) -> str:
    """Return the place of the first line that is not UTF-8."""
    with _opened(source, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return place(source, number)
    return str(source)


def _json_rows(source: Path, file: TextIO) -> Iterator[tuple[Row, str, int]]:
    for number, line in enumerate(file, 1):
        if not (line := line.strip(" \t\r\n")):
            continue  # no row: often the last line
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{place(source, number)}: expected a JSON object; got no JSON ({error}): write one object on each line") from error
        if not isinstance(row, dict):
            raise UsageError(f"{place(source, number)}: expected a JSON object; got {type(row).__name__}: write one object on each line")
        yield row, line, number


def _text_rows(source: Path, file: TextIO) -> Iterator[tuple[Row, str, int]]:
    for number, line in enumerate(file, 1):
        text = line.removesuffix("\n")
        if not text.strip():  # as in a recipe's texts: no row, or an empty text?
            raise UsageError(f"{place(source, number)}: the line is empty; remove it, or give JSON Lines, where a text may be empty")
        if is_utf16(line.encode()):
            raise UsageError(f"{place(source, number)}: expected UTF-8; got NUL in every other byte, as in UTF-16: save it as UTF-8")
        row = {"text": text}
        # Escaped where a reader may see more than one line: U+2028 and the like.
        yield row, json.dumps(row, ensure_ascii=len(text.splitlines()) > 1), number


def _write_json(file: TextIO, lines: list[str], key: str, values: list[Any]) -> None:
    """Write each line as it is: numbers that Python does not hold keep all digits."""
    for line, value in zip(lines, values, strict=True):
        row = line[:-1].rstrip(" \t")
        file.write(f"{row}{'' if row == '{' else ', '}{json.dumps(key)}: {_as_json(value, ensure_ascii=False)}}}\n")


def _as_json(value: Any, ensure_ascii: bool = True) -> str:
    """Return an answer as JSON; an embedding in the fewest digits that give the same float32 again."""
    if _is_vector(value):
        return f"[{', '.join(value.astype(str).tolist())}]"
    return json.dumps(task_outputs.plain(value), ensure_ascii=ensure_ascii)


def _is_vector(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1


def _csv_rows(source: Path, file: TextIO) -> Iterator[tuple[Row, Row, int]]:
    before = csv.field_size_limit(_FIELD)
    reader = csv.DictReader(file, strict=True)  # else an open quote takes all rows behind it for one text
    try:
        names = list(reader.fieldnames or ())
        if not names and reader.line_num:
            raise UsageError(f"{place(source, 1)}: expected the names of the columns; got an empty line: remove it")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise UsageError(f"'{source}' has several columns '{twice}', of which only one would remain; rename them")
        for row in reader:
            if None in row:
                got = len(names) + len(row[None])
                raise UsageError(f"{place(source, reader.line_num)}: expected {len(names)} fields, as in the header; got {got}: quote texts with commas")
            yield row, row, reader.line_num
    except csv.Error as error:
        raise UsageError(f"{place(source, reader.reader.line_num)}: expected CSV; got {error}: check its quotes, or give JSON Lines") from error
    finally:
        csv.field_size_limit(before)


def _write_csv(file: TextIO, rows: list[Row], key: str, values: list[Any]) -> None:
    writer = csv.DictWriter(file, [*rows[0], key])
    writer.writeheader()
    for row, value in zip(rows, values, strict=True):
        writer.writerow({**row, key: value if isinstance(value, str) else _as_json(value)})


def _tables(source: Path, size: int) -> Iterator[Any]:
    pyarrow, parquet = _arrow()
    held: list[Any] = []
    room = size
    try:
        file = parquet.ParquetFile(source)
        for batch in file.iter_batches():
            start = 0
            while start < batch.num_rows:
                held.append(batch.slice(start, room))
                start, room = start + held[-1].num_rows, room - held[-1].num_rows
                if not room:
                    yield pyarrow.Table.from_batches(held)
                    held, room = [], size
        if held:
            yield pyarrow.Table.from_batches(held)
    except pyarrow.ArrowException as error:
        raise UsageError(f"'{source}' cannot be read as Parquet ({error}); write it again, or give JSON Lines or CSV") from error


def _column_rows(table: Any, columns: Sequence[str]) -> list[Row]:
    """Return the rows with `columns` and the names of the others: those may hold what Python has no type for."""
    others = dict.fromkeys(table.column_names)
    return [{**others, **row} for row in table.select([name for name in columns if name in others]).to_pylist()]


def _write_table(file: Any, table: Any, key: str, values: list[Any], spec: Spec, options: AnswerOptions) -> None:
    pyarrow, parquet = _arrow()
    values = [value if _is_vector(value) else task_outputs.plain(value) for value in values]
    parquet.write_table(table.append_column(key, pyarrow.array(values, _type(pyarrow, spec, options))), file)


def _type(pyarrow: Any, spec: Spec, options: AnswerOptions) -> Any:
    """Return the type of a model's answers. Inferred, it would be another one in a part whose answers are all empty lists."""
    listed, text, whole, score = pyarrow.list_, pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    vector, place = listed(pyarrow.float32()), {"start": whole, "end": whole}
    if spec.task == "feature-extraction":
        if spec.sparse:
            return pyarrow.struct({"indices": listed(whole), "values": vector})
        return vector if spec.granularity == "text" else listed(vector)
    if spec.task == "text-classification":
        label = pyarrow.struct({"label": text, "score": score})
        return label if options.top_k == "default" and not spec.multi_label else listed(label)
    if spec.task == "token-classification":
        kind = "entity" if options.aggregation_strategy == "none" else "entity_group"
        return listed(pyarrow.struct({kind: text, "score": score, "word": text, **place}))
    if spec.task == "question-answering":
        return pyarrow.struct({"answer": text, "score": score, **place})
    return listed(listed(pyarrow.struct({"score": score, "token": whole, "token_str": text})))


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise missing_library("Parquet needs pyarrow", "pyarrow", "give JSON Lines or CSV", failed=error) from error
    return pyarrow, parquet
