"""Read the user's texts: `.txt` (one a line) or `.jsonl` (`{"text": …, "label": …}`)."""

from __future__ import annotations

import codecs
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from bertopt.checks import probes, span_metrics, task_metrics
from bertopt.core import Spec
from bertopt.errors import UsageError, missing_library
from bertopt.spec import Label, Text
from bertopt.system.untrusted import is_utf16

#: Characters kept of a text: several times what fills the longest model. Tokenising megabytes takes minutes and gigabytes.
LONGEST = 100_000


@dataclass(frozen=True)
class Texts:
    """Texts in file order; `labels` where every line has one. `source` is None for the built-in probe texts."""

    texts: tuple[str, ...]
    labels: tuple[Label, ...] | None = None
    source: str | None = None
    second: tuple[str, ...] | None = None
    """The second text of each pair, where every line is one."""
    built_in: tuple[str, ...] = ()
    """Texts of the tokenizer's own words, which take the place of the built-in ones where it knows few of those."""

    def for_tokenizer(self, own: Sequence[str]) -> Texts:
        """Return these texts with the built-in ones replaced by `own`, texts of a tokenizer's own words, if there are any."""
        if not own:
            return self
        return replace(self, texts=self.texts if self.source else tuple(own), built_in=tuple(own))

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.texts, self.labels, self.second]).encode()).hexdigest()

    def asked(self, task: str) -> tuple[Text, ...]:
        """Return what a predictor of this task is given: each text, each pair, or both texts of it for embeddings.

        Raises UsageError for pairs where the task takes none.
        """
        if self.second is None:
            return self.texts
        if task not in ("text-classification", "question-answering", "feature-extraction"):
            raise UsageError(f"{self.source}: text_pair must be left out, since a model for {task} takes single texts; rename or remove it")
        return (*self.texts, *self.second) if task == "feature-extraction" else tuple(zip(self.texts, self.second, strict=True))

    def check_labels(self, spec: Spec) -> None:
        """Raise UsageError that names the lines whose labels do not fit the model, or for pairs where the model takes none.

        Raises Unsupported where scikit-learn, which the metrics of the labels need, is not installed.
        """
        self.asked(spec.task)
        if self.labels is None or not task_metrics.measurable(spec, True, self.second is not None):
            return
        if spec.task == "text-classification" and not spec.graded and find_spec("sklearn") is None:
            raise missing_library("labelled texts need scikit-learn", "'bertopt[metrics]'", "give texts without labels")
        labelled = zip(self.texts, self.labels, strict=True)
        mistakes = ((line, _mistake(spec, text, label)) for line, (text, label) in enumerate(labelled, 1))
        _raise_first([f"{self.source}:{line}: {mistake}" for line, mistake in mistakes if mistake])


class _Line(NamedTuple):
    """What one line of a file says."""

    text: str
    label: Label | None = None
    text_pair: str | None = None


def read_or_built_in(path: str | Path | None) -> Texts:
    """Return the texts in a file, or the built-in ones where none is given. Raises UsageError as `read` does."""
    return read(path) if path else Texts(tuple(probes.built_in_texts()))


def read(path: str | Path) -> Texts:
    """Return the texts in a file, each cut to `LONGEST` characters.

    Raises UsageError with every bad line (at most ten shown): empty, not UTF-8, no JSON, no text, a label on some lines only.
    """
    path = Path(path)
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
    except OSError as error:
        raise UsageError(f"texts '{path}' cannot be read ({error.strerror}); check the path") from error
    if not content:
        raise UsageError(f"{path}: expected at least one text; the file is empty")
    # Not splitlines: a text may hold U+2028 and the like.
    lines = content.replace(b"\r\n", b"\n").replace(b"\r", b"\n").removesuffix(b"\n").split(b"\n")
    parse = _plain if path.suffix == ".txt" else _json
    problems: list[str] = []
    parsed: dict[int, _Line] = {}
    for number, line in enumerate(lines, 1):
        try:
            parsed[number] = parse(line)
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    for key, advice in (("label", "label all lines or none"), ("text_pair", "give all lines one or none")):
        without = [number for number, line in parsed.items() if getattr(line, key) is None]
        if 0 < len(without) < len(parsed):
            problems.append(f"{path}:{without[0]}: no {key}, but other lines have one; {advice}")
    if problems and path.suffix not in ("", ".txt", ".jsonl"):
        raise UsageError(f"texts must be a .txt or .jsonl file; got '{path}'")
    _raise_first(problems)
    labels = tuple(line.label for line in parsed.values() if line.label is not None)
    second = tuple(line.text_pair for line in parsed.values() if line.text_pair is not None)
    return Texts(tuple(line.text for line in parsed.values()), labels or None, str(path), second or None)


def _raise_first(mistakes: Sequence[str]) -> None:
    """Raise UsageError with the first ten mistakes, if there are any."""
    if mistakes:
        raise UsageError(*mistakes[:10], *([f"and {len(mistakes) - 10} more"] if len(mistakes) > 10 else []))


def _mistake(spec: Spec, text: str, label: Label) -> str | None:
    """Return what is wrong with a line's label for this model, or None."""
    if spec.graded:
        try:
            good = isinstance(label, str) and math.isfinite(float(label))
        except ValueError:
            good = False
        if len(spec.labels) > 1 and spec.regression:
            return f"there is no metric for a regression of {len(spec.labels)} values; give texts without labels"
        return None if good else f"label must be a number; got {_shown(label)}"
    if spec.task == "question-answering":
        return "label must be the answer, or a list of those that are right; got an empty list" if label == () else None
    if spec.task == "token-classification":
        count = len(span_metrics.words(text))
        if isinstance(label, str) or len(label) != count:
            return f"label must be a list of one tag for each of the text's {count} words; got {_shown(label)}"
    elif not isinstance(label, str) and not spec.multi_label:
        return f"label must be one label, as the model gives one to each text; got {_shown(label)}"
    unknown = next((name for name in ((label,) if isinstance(label, str) else label) if name not in spec.labels), None)
    if unknown is None:
        return None
    # Datasets often hold a label's number, and the names below are not in the order of numbers.
    meant = dict(zip(map(str, range(len(spec.labels))), spec.labels, strict=True)).get(unknown)
    hint = "" if meant is None else f": give names; {unknown} is the number of '{meant}'"
    return f"label must be one of {', '.join(sorted(spec.labels))}; got '{unknown}'{hint}"


def _shown(label: Label) -> str:
    return f"'{label}'" if isinstance(label, str) else f"a list of {len(label)}"


def _plain(line: bytes) -> _Line:
    """Return the text of a line of a .txt file. Raises ValueError with what is wrong."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8; byte {error.start + 1} of the line is not; save the file as UTF-8") from error
    if is_utf16(line):
        raise ValueError("expected UTF-8; got NUL in every other byte, as in UTF-16; save the file as UTF-8")
    if not text.strip():
        raise ValueError("the line is empty; remove it")
    return _Line(text[:LONGEST])


def _json(line: bytes) -> _Line:
    """Return text, label and second text of a line of a .jsonl file. Raises ValueError with what is wrong."""
    _plain(line)
    try:
        entry: Any = json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object; {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object; {error}") from error
    if not isinstance(entry, dict) or "text" not in entry:
        raise ValueError('expected {"text": "…", "label": "…"}; there is no text')
    if not isinstance(entry["text"], str):
        raise ValueError(f"text must be text in quotes; got {json.dumps(entry['text'])[:40]}")
    text, label, second = entry["text"], entry.get("label"), entry.get("text_pair")
    if second is not None and not isinstance(second, str):
        raise ValueError(f"text_pair must be text; got {type(second).__name__}")
    every = label if isinstance(label, list) else [label]
    if any(isinstance(one, list | dict) for one in every) or (isinstance(label, list) and None in label):
        raise ValueError("label must be text or a number, or a list of these; got a list or an object inside, or null")
    label = None if label is None else tuple(map(str, every)) if isinstance(label, list) else str(label)
    try:
        "".join([text, second or "", *map(str, every)]).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair (\\ud800 to \\udfff) is not a character; write the character itself") from error
    return _Line(text[:LONGEST], label, None if second is None else second[:LONGEST])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")
