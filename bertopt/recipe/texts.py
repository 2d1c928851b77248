"""The user's texts: `.txt` (one a line) or `.jsonl` (`{"text": …, "label": …}`)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertopt.core import Spec
from bertopt.errors import UsageError


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
        """Raises UsageError where a label is none of the model's, naming the lines."""
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
    """Raises UsageError with every bad line (at most ten shown): empty, no JSON, no text, a label on some lines only."""
    path = Path(path)
    try:
        # Not splitlines: a text may hold U+2028 and the like.
        lines = path.read_text("utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"texts '{path}' cannot be read as UTF-8: {error}") from error
    problems: list[str] = []
    texts: list[str] = []
    labels: list[str | None] = []
    if lines == [""]:
        raise UsageError(f"{path}: expected at least one text; the file is empty")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            problems.append(f"{path}:{number}: the line is empty; remove it")
            continue
        if path.suffix == ".txt":
            texts.append(line)
            labels.append(None)
            continue
        problem, text, label = _parse(line)
        if problem:
            problems.append(f"{path}:{number}: {problem}")
        else:
            texts.append(text)
            labels.append(label)
    with_label = [label for label in labels if label is not None]
    if with_label and len(with_label) < len(labels) and not problems:
        first = labels.index(None) + 1
        problems.append(f"{path}:{first}: no label, but other lines have one; label all lines or none")
    if problems:
        raise UsageError(*problems[:10], *([f"and {len(problems) - 10} more"] if len(problems) > 10 else []))
    return Texts(tuple(texts), tuple(with_label) if with_label else None, str(path))


def _parse(line: str) -> tuple[str | None, str, str | None]:
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        return f"expected a JSON object; {error.msg} at column {error.colno}", "", None
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        return 'expected {"text": "…", "label": "…"}; there is no text', "", None
    label = entry.get("label")
    return None, entry["text"], None if label is None else str(label)
