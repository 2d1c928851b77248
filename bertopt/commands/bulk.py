"""`bertopt bulk`: answer a file of texts, in parts, with exactly one row for each row read.

A part is written under another name and then renamed, so that every part is complete: after an interruption the same call continues with the
missing part. The hash of each finished part is recorded, so that a changed one is refused. Not noticed: a change of the input that leaves
its size and time as they were.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from bertopt import ray, stages
from bertopt._version import __version__
from bertopt.commands import bulk_files
from bertopt.commands.bulk_files import Row, Rows
from bertopt.errors import IntegrityError, UsageError, WrongAnswer
from bertopt.modeling.sentence_transformers import leaves_prompts_out, read_prompts
from bertopt.modeling.source import sha256
from bertopt.runtime.answer_options import DEFAULTS, AnswerOptions
from bertopt.runtime.load import load
from bertopt.runtime.predictor import Answer
from bertopt.runtime.text_inputs import SECOND, prompted, usual_pair
from bertopt.spec import Spec, Text
from bertopt.system import atomic_write, directory_lock
from bertopt.system.untrusted import plain

PART_ROWS = 10_000
STATE = "bulk.json"
#: Held by the one call that writes to a directory.
LOCK = ".bulk.lock"


@dataclass(frozen=True)
class _Part:
    """Rows that become one file; `end` counts the rows up to the last of them."""

    path: Path
    rows: Rows
    texts: list[Text]
    end: int


@dataclass(frozen=True)
class Answered:
    """What a call did."""

    rows: int
    truncated: int
    """Rows whose text was longer than the model takes, and cut off."""


def bulk(
    source: Path, out: Path, artefact: Path, column: str = "text", pair: str | None = None, part_rows: int = PART_ROWS,
    threads: int | None = None, progress: Callable[[int], None] | None = None, actors: int = 0, options: AnswerOptions = DEFAULTS,
    public_key: Path | None = None,
) -> Answered:  # fmt: skip
    """Answer the texts of `column` of a .jsonl, .csv or .parquet file, or the lines of a .txt file, as `options` say.

    With `pair` rows are pairs with that column. All but Parquet may be in gzip (.gz).

    Without `pair` a classifier or a model that answers questions takes the column `text_pair` where there is one beside `text`.

    Writes `out/part-00000.…` in the input's format, JSON Lines for .txt: the row as it was read and `embedding` or `answer`. Parts that are there
    are kept if input, artefact and options are the same; UsageError otherwise, for a row without a text (before any is answered) and
    while another call writes to `out`. IntegrityError where a part was changed since it was finished. `progress` is called with the rows done.
    With `public_key` the artefact must be signed with it.
    With `actors`, as many of Ray's answer, of one thread each or `threads`; else this process does.
    """
    suffix = bulk_files.suffix_of_parts(source)
    if part_rows < 1:
        raise UsageError(f"a part must have at least 1 row; got {part_rows}")
    manifest, stat = stages.verify(artefact, public_key), source.stat()
    options.check(manifest.spec)
    embeds = manifest.spec.task == "feature-extraction"
    if options.prompt_name is not None:  # refuse one that the model has not, and any for pairs, before anything is read
        prompts = read_prompts(artefact) if embeds else {}
        prompted([] if pair is None else [("", "")], prompts, options.prompt_name, embeds and leaves_prompts_out(artefact))
    if not source.is_file():
        raise UsageError(f"'{source}' must be a regular file, since an interrupted call reads it again; write what comes from a pipe to a file first")
    usual = usual_pair(manifest.spec.task, column) if pair is None else None
    pair = usual if usual is not None and usual in bulk_files.columns(source) else pair
    if pair is None and manifest.spec.task == "question-answering":
        raise UsageError(f"question answering takes a question and a context; the rows have no column '{SECOND}': name their columns with --column and --pair")
    wanted = {
        "bertopt_version": __version__, "artefact_sha256": manifest.content_sha256, "input_bytes": stat.st_size,
        "input_modified_ns": stat.st_mtime_ns, "column": column, "pair": pair, "part_rows": part_rows,
        **asdict(options),
    }  # fmt: skip
    call = _Bulk(
        source, suffix, manifest.spec, out, columns=(column,) if pair is None else (column, pair), options=options, part_rows=part_rows,
        key="embedding" if embeds else "answer", wanted=wanted, left_out=usual if pair is None else None, finished={},
    )  # fmt: skip
    with _alone(out):
        call.finished.update(_unchanged(out, _check_state(out, wanted)))
        return call.run(artefact, public_key, threads, progress, actors)


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keep other calls out of a directory, without what one that was killed left half written. Raises UsageError for somebody else's."""
    out.mkdir(parents=True, exist_ok=True)
    if not (out / STATE).is_file() and not {*out.iterdir()} <= {out / LOCK, *_half_written(out)}:
        raise UsageError(f"'{out}' is not empty and holds no {STATE}; give another directory")
    lock = FileLock(out / LOCK)
    try:
        directory_lock.take(lock)
    except Timeout as error:
        raise UsageError(f"another call writes to '{out}'; wait for its end, or give another directory") from error
    try:
        for left in _half_written(out):
            left.unlink()
        yield
    finally:
        lock.release()


@dataclass(frozen=True)
class _Bulk:
    """One call, alone in its directory."""

    source: Path
    suffix: str
    spec: Spec
    out: Path
    columns: Sequence[str]
    options: AnswerOptions
    part_rows: int
    key: str
    wanted: dict[str, Any]
    left_out: str | None
    """A column that would make pairs, and that the first row has not: no other may have it."""
    finished: dict[str, dict[str, Any]]
    """The `sha256` of each part that is finished, and how many of its texts were `truncated`, by its name."""

    def run(self, artefact: Path, public_key: Path | None, threads: int | None, progress: Callable[[int], None] | None, actors: int) -> Answered:
        """Answer the parts that are missing."""
        # All rows first: a bad one at the end would be found after hours, and a mended file is another one.
        rows = sum(len(part.texts) for part in self._parts())
        missing = self._missing(progress or (lambda rows: None))
        if actors:
            answered = ray.answers(missing, artefact, self.wanted["artefact_sha256"], actors, threads or 1, public_key, self.options)
        else:
            answered = self._answers(missing, artefact, public_key, threads)
        for part, answer in answered:
            values = answer.values
            if (wrong := _not_finite(values)) is not None:
                place = bulk_files.place(self.source, part.rows.numbers[wrong])
                raise WrongAnswer(f"{place}: expected a finite embedding; got NaN or infinity: check the artefact with `bertopt verify`")
            self._check_input()  # before the write, so that a part that stands is of the input as it was
            bulk_files.write(part.path, part.rows, self.key, values, self.spec, self.options)
            self.finished[part.path.name] = {"sha256": sha256(part.path), "truncated": len(answer.truncated)}
            _write_state(self.out, self.wanted, parts=self.finished, complete=False)
            if progress is not None:
                progress(part.end)
        self._check_input()
        _write_state(self.out, self.wanted, parts=self.finished, rows=rows, complete=True)
        return Answered(rows, sum(part["truncated"] for part in self.finished.values()))

    def _answers(self, parts: Iterable[_Part], artefact: Path, public_key: Path | None, threads: int | None) -> Iterator[tuple[_Part, Answer]]:
        """Yield each part with its answers. The artefact is opened for the first one; UsageError where it is no longer that of the call."""
        predictor = None
        for part in parts:
            if predictor is None:
                predictor = load(artefact, threads=threads, key=public_key)
                if stages.read_manifest(artefact).content_sha256 != self.wanted["artefact_sha256"]:
                    raise UsageError(f"'{artefact}' was replaced by another artefact during the call; start again with another directory")
            yield part, predictor.answer(part.texts, **asdict(self.options))

    def _check_input(self) -> None:
        """Raise UsageError where the input is no longer the file whose rows were checked."""
        stat = self.source.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self.wanted["input_bytes"], self.wanted["input_modified_ns"]):
            raise UsageError(
                f"'{self.source}' must stay the same until all its rows are answered; its size or time changed during the call: "
                "start again with another directory, on a file that nobody writes to"
            )

    def _missing(self, progress: Callable[[int], None]) -> Iterator[_Part]:
        for part in self._parts():
            if part.path.name in self.finished:
                progress(part.end)
            else:
                yield part

    def _parts(self) -> Iterator[_Part]:
        done = 0
        for number, rows in zip(count(), bulk_files.read(self.source, self.columns, self.part_rows), strict=False):
            if any(self.key in row for row in rows.rows):
                raise UsageError(f"the input has a column '{self.key}' already, which the answers would replace; rename it")
            texts = [self._text(row, number) for row, number in zip(rows.rows, rows.numbers, strict=True)]
            done += len(texts)
            yield _Part(self.out / f"part-{number:05d}{self.suffix}", rows, texts, done)

    def _text(self, row: Row, number: int) -> Text:
        found, place = [], bulk_files.place(self.source, number)
        if self.left_out in row:
            raise UsageError(f"{place}: a column '{self.left_out}', but the first row has none: give all rows one, or none")
        for name in self.columns:
            if name not in row:
                raise UsageError(f"{place}: expected a column '{name}'; got {plain(', '.join(map(str, row))) or 'none'}: name columns with --column and --pair")
            if not isinstance(row[name], str):
                got = "nothing (null, or a row with too few fields)" if row[name] is None else type(row[name]).__name__
                raise UsageError(f"{place}: column '{name}' must be a text; got {got}")
            if not _encodes(row[name]):
                raise UsageError(f"{place}: column '{name}' has half a surrogate pair (\\ud800 to \\udfff), which is no character; write the character itself")
            found.append(row[name])
        return found[0] if len(found) == 1 else (found[0], found[1])


def _not_finite(values: Any) -> int | None:
    """Return the number of the first embedding that is not finite."""
    vectors = values if isinstance(values, np.ndarray) else [one.get("values", ()) if isinstance(one, dict) else () for one in values]
    return next((number for number, vector in enumerate(vectors) if not np.isfinite(vector).all()), None)


def _half_written(out: Path) -> list[Path]:
    """Return the files that a call which was killed was writing."""
    return [path for pattern in (".part-*.tmp", f".{STATE}.*.tmp") for path in out.glob(pattern)]


def _unchanged(out: Path, finished: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the finished parts that are there. Raises IntegrityError where one is not as it was written: its rows may be lost or altered."""
    there = {name: part for name, part in finished.items() if (out / name).exists()}
    for name, part in there.items():
        if sha256(out / name) != part["sha256"]:
            raise IntegrityError(
                f"'{out / name}' is not as it was written (its sha256 is not the one in {STATE}); move or remove it to have its rows answered "
                "again, or give another directory"
            )
    return there


def _check_state(out: Path, wanted: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Note what this call wants, unless an equal one did; return what it recorded of the parts that it finished, by their names.

    Raises UsageError where parts of another call are there.
    """
    path = out / STATE
    if path.is_file():
        try:
            there = dict(json.loads(path.read_text("utf-8")))
            finished = dict(there.get("parts", {}))
        except (ValueError, TypeError) as error:
            raise UsageError(f"'{path}' cannot be read ({error}); give another directory, or remove '{out}'") from error
        other = [name for name, value in wanted.items() if there.get(name) != value]
        if not other:
            return finished
        # Without parts that call stopped at its first one, often by a bad row of an input that was mended since.
        if any(out.glob("part-*")):
            raise UsageError(f"'{out}' holds parts of another call ({', '.join(other)} differ); give another directory, or remove it")
    _write_state(out, wanted, parts={}, complete=False)
    return {}


def _write_state(out: Path, wanted: Mapping[str, Any], **more: object) -> None:
    atomic_write.write(out / STATE, json.dumps({**wanted, **more}, indent=2) + "\n")


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
