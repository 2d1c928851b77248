"""Read the user's texts: `.txt` (one a line) or `.jsonl` (`{"text": …, "label": …}`)."""

from __future__ import annotations

import codecs
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertopt.core import Spec
from bertopt.errors import UsageError

#: Characters kept of a text: several times what fills the longest model. Tokenising megabytes takes minutes and gigabytes.
LONGEST = 100_000


@dataclass(frozen=True)
class Texts:
    """Texts in file order; `labels` where every line has one. `source` is None for the built-in probe texts."""

    texts: tuple[str, ...]
    labels: tuple[str, ...] | None = None
    source: str | None = None

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([self.texts, self.labels]).encode()).hexdigest()

    def check_labels(self, spec: Spec) -> None:
        """Raise UsageError where a label is none of the model's, naming the lines."""
        if self.labels is None or spec.task != "text-classification":
            return
        wrong = [
            f"{self.source}:{line}: label must be one of {', '.join(sorted(spec.labels))}; got '{label}'"
            for line, label in enumerate(self.labels, 1)
            if label not in spec.labels
        ]
        if wrong:
            raise UsageError(*wrong[:10], *([f"and {len(wrong) - 10} more"] if len(wrong) > 10 else []))


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
    entries: list[tuple[str, str | None]] = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(parse(line))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    labels = [label for _, label in entries if label is not None]
    if 0 < len(labels) < len(entries) and not problems:
        first = next(number for number, (_, label) in enumerate(entries, 1) if label is None)
        problems.append(f"{path}:{first}: no label, but other lines have one; label all lines or none")
    if problems:
        raise UsageError(*problems[:10], *([f"and {len(problems) - 10} more"] if len(problems) > 10 else []))
    return Texts(tuple(text for text, _ in entries), tuple(labels) or None, str(path))


def _plain(line: bytes) -> tuple[str, None]:
    """A line of a .txt file. Raises ValueError with what is wrong."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"expected UTF-8; byte {error.start + 1} of the line is not; save the file as UTF-8") from error
    if not text.strip():
        raise ValueError("the line is empty; remove it")
    return text[:LONGEST], None


def _json(line: bytes) -> tuple[str, str | None]:
    """Text and label of a line of a .jsonl file. Raises ValueError with what is wrong."""
    text, _ = _plain(line)
    try:
        entry: Any = json.loads(line, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object; {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object; {error}") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise ValueError('expected {"text": "…", "label": "…"}; there is no text')
    text, label = entry["text"], entry.get("label")
    if isinstance(label, list | dict):
        raise ValueError("label must be text or a number; got a list or an object")
    label = None if label is None else str(label)
    try:
        (text + (label or "")).encode()
    except UnicodeEncodeError as error:
        raise ValueError("half a surrogate pair (\\ud800 to \\udfff) is no character; write the character itself") from error
    return text[:LONGEST], label


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")
