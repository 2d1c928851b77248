"""Read YAML as plain data with the position of every key and value, so that mistakes can name line and column.

A small, safe part of YAML 1.2: text, whole numbers, floats, true/false, null, lists and mappings. No tags, anchors,
aliases or merge keys, and nothing that YAML 1.1 would silently read as something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import yaml

from bertopt.errors import UsageError
from bertopt.system.untrusted import printable

KeyPath = tuple[str | int, ...]

_INT = r"[-+]?(?:0|[1-9][0-9]*)"
#: Tag and pattern of every plain scalar that is not text, after YAML 1.2's core schema.
_SCALARS = (
    ("null", r"(?:null|~|)"),
    ("bool", r"(?:true|false)"),
    ("int", _INT),
    ("leading zero", r"[-+]?0[0-9]+"),
    ("float", rf"(?:{_INT}(?:\.[0-9]*)?|[-+]?\.[0-9]+)(?:[eE][-+]?[0-9]+)?"),
    ("not finite", r"(?:[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))"),
)
_REFUSED = "refused"
#: What `"\ud800"` reads as: no text can be written to a file with it.
_SURROGATE = re.compile("[\ud800-\udfff]")
#: Longest message about one mistake: a value or key may be of any length. The middle is left out.
_LONGEST = 600
#: Mistakes named at most.
_MOST = 100


class Place(NamedTuple):
    """The position of a key or value: how to print it, and how to sort it."""

    order: tuple[int, int, int]
    label: str


class _Loader(yaml.SafeLoader):
    """Composes nodes only. What the recipe format refuses is noted and replaced."""

    yaml_implicit_resolvers: ClassVar[dict[Any, Any]] = {}  # type: ignore[misc]

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.refused: list[tuple[Any, str]] = []

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        untyped: Any = self
        event = untyped.peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            untyped.get_event()
            if getattr(index, "value", None) != "<<":  # the merge key is reported itself
                self.refused.append((mark, f"alias '*{event.anchor}' is not supported; write the value out"))
            return yaml.ScalarNode(_REFUSED, "", mark, mark)
        self.anchors.clear()
        node = super().compose_node(parent, index)
        if event.anchor:
            self.refused.append((mark, f"anchor '&{event.anchor}' is not supported; leave it out"))
        if event.tag is not None and node is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            self.refused.append((mark, f"tag '{tag}' is not supported; write the plain value"))
            node.tag = _REFUSED
        return node


for _tag, _pattern in _SCALARS:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"{_pattern}\Z"), None)


class Document:
    """Plain data, the places of its keys and values by path, and the mistakes found in it so far."""

    def __init__(self, source: str, data: Any = None) -> None:
        self.source = source
        self.data = data
        self._problems: list[tuple[Place, KeyPath, str]] = []
        self._keys: dict[KeyPath, Place] = {}
        self._values: dict[KeyPath, Place] = {}
        self._broken: set[KeyPath] = set()

    @classmethod
    def read(cls, text: str, source: str) -> Document:
        """Raise UsageError where `text` is no YAML at all."""
        document = cls(source)
        try:
            document.data = document._read(text, (), document._place)
        except yaml.YAMLError as error:
            line, column, words = _syntax(error, text)
            raise UsageError(f"{source}:{line}:{column}: not valid YAML: {words}") from error
        return document

    def report(self, path: KeyPath, message: str, *, key: bool = False, at: Place | None = None) -> None:
        """Note a mistake at `path` or its nearest existing parent. Quiet where the value itself could not be read."""
        if not any(path[: len(broken)] == broken for broken in self._broken):
            self._problems.append((at or self._at(path, key), path, message))

    def mistaken(self, path: KeyPath) -> bool:
        """Whether a mistake was found at `path` or below."""
        found = [*(where for _, where, _ in self._problems), *self._broken]
        return any(where[: len(path)] == path for where in found)

    def raise_problems(self) -> None:
        """Raise UsageError with every mistake, in the order of the file."""
        if self._problems:
            ordered = sorted(self._problems, key=lambda problem: problem[0].order)
            texts = list(dict.fromkeys(_shortened(printable(f"{place.label}: {message}")) for place, _, message in ordered))
            more = [f"{self.source}: and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
            raise UsageError(*texts[:_MOST], *more)

    def replace(self, path: KeyPath, text: str, place: Place) -> None:
        """Replace the value at `path`, and the mistakes found in it, by the YAML `text`."""
        for places in (self._keys, self._values):
            for old in [old for old in places if old[: len(path)] == path]:
                del places[old]
        self._broken = {old for old in self._broken if old[: len(path)] != path}
        self._problems = [problem for problem in self._problems if not path or problem[1][: len(path)] != path]
        try:
            value = self._read(text, path, lambda mark: place)
        except yaml.YAMLError as error:
            self.report((), f"the value is not valid YAML: {_syntax(error, text)[2]}", at=place)
            return
        self._keys[path] = self._values[path] = place
        here = self.data
        for part in path[:-1]:
            if isinstance(here, dict) and here.get(part) is None:
                here[part] = {}
            here = here[part]
        here[path[-1]] = value

    def _at(self, path: KeyPath, key: bool) -> Place:
        for places, wanted in ((self._keys, path if key else None), (self._values, path)):
            if wanted in places:
                return places[wanted]
        for end in range(len(path) - 1, -1, -1):
            if path[:end] in self._values:
                return self._values[path[:end]]
        return Place((0, 0, 0), ":".join([self.source, *([".".join(map(str, path))] if path else [])]))

    def _place(self, mark: Any) -> Place:
        return Place((0, mark.line + 1, mark.column + 1), f"{self.source}:{mark.line + 1}:{mark.column + 1}")

    def _read(self, text: str, path: KeyPath, place: Callable[[Any], Place]) -> Any:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            self._problems += [(place(mark), path, message) for mark, message in loader.refused]
            return None if node is None else self._convert(node, path, place)
        except RecursionError:
            raise yaml.YAMLError("nested too deeply") from None
        finally:
            loader.dispose()

    def _convert(self, node: Any, path: KeyPath, place: Callable[[Any], Place]) -> Any:
        self._values[path] = place(node.start_mark)
        if node.tag == _REFUSED:
            self._broken.add(path)
            return None
        if isinstance(node, yaml.SequenceNode):
            return [self._convert(item, (*path, index), place) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path, place)
        try:
            return _scalar(node)
        except ValueError as error:
            self.report(path, str(error))
            self._broken.add(path)
            return None

    def _mapping(self, node: yaml.MappingNode, path: KeyPath, place: Callable[[Any], Place]) -> dict[str, Any]:
        data: dict[str, Any] = {}
        for key, value in node.value:
            here, problem = place(key.start_mark), None
            inner = (*path, key.value) if isinstance(key, yaml.ScalarNode) else path
            if key.tag == _REFUSED:
                continue
            if inner == path:
                problem = "a key must be plain text; got a list or mapping"
            elif key.value == "<<" and key.style is None:
                problem = "merge key '<<' is not supported; write the keys out"
            elif _SURROGATE.search(key.value):
                problem = f"a key must be plain text; got {key.value!r}"
            elif inner in self._keys:
                lines = f"{self._keys[inner].order[1]} and {here.order[1]}"
                problem = f"key '{key.value}' is given twice, on lines {lines}; keep one"
            if problem is not None:
                self._problems.append((here, path, problem))
                continue
            self._keys[inner] = here
            data[key.value] = self._convert(value, inner, place)
        return data


def _scalar(node: Any) -> Any:
    """Raises ValueError for a number that is not one, or that could be two."""
    text = node.value
    if _SURROGATE.search(text):
        raise ValueError(f"half a surrogate pair is not a character; got {text!r}; write the character itself")
    if node.tag in ("null", "bool"):
        return {"null": None, "true": True, "false": False}.get(text)
    if node.tag == "leading zero":
        octal = f" or {int(text, 8)}" if not set(text) & set("89") else ""
        raise ValueError(f"a number must not start with 0; got {text}; write {int(text)}{octal}, or '{text}' for text")
    if node.tag == "not finite" or (node.tag in ("int", "float") and not math.isfinite(float(text))):
        raise ValueError(f"a number must be finite; got {text}")
    if node.tag == "int":
        return int(text)
    return float(text) if node.tag == "float" else text


def _syntax(error: yaml.YAMLError, text: str) -> tuple[int, int, str]:
    """Line, column and words of a syntax error."""
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        column = len(before) - before.rfind("\n")
        return before.count("\n") + 1, column, f"character U+{ord(text[error.position]):04X} is not allowed; remove it"
    if not isinstance(error, yaml.MarkedYAMLError):
        return 1, 1, str(error)
    mark = error.problem_mark or error.context_mark
    said = " ".join(filter(None, (error.context, error.problem)))
    words = f"{said}; check indentation, brackets and quotes"
    return (mark.line + 1, mark.column + 1, words) if mark is not None else (1, 1, words)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
