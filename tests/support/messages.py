"""Every sentence of bertopt that a user can meet: `python -m tests.support.messages [FOLDER…]` lists them.

Docstrings, help texts, printed lines, and the literals of errors and findings. What a placeholder stands for is shown as {}.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Calls whose text a user reads, beside errors (any name that is raised).
CALLS = {"print", "warn", "report", "Finding", "Option", "Argument", "Typer", "Field", "on_progress", "Unsupported"}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Message:
    """One sentence or docstring, and where it stands."""

    path: Path
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.kind}: {' '.join(self.text.split())}"


def messages(path: Path) -> Iterator[Message]:
    """Yield the messages and docstrings of one file, in the order of the file."""
    tree = ast.parse(path.read_text("utf-8"))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and (text := ast.get_docstring(node)):
            found.append(Message(path, node.body[0].lineno, "docstring", text))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found += [Message(path, node.lineno, "error", text) for text in _literals(node.exc)]
        elif isinstance(node, ast.Call) and (_name(node.func) in CALLS or _name(node.func).endswith("Error")):
            found += [Message(path, node.lineno, _name(node.func), text) for text in _literals(node)]
    yield from sorted(dict.fromkeys(found), key=lambda message: message.line)


def comments(path: Path) -> Iterator[Message]:
    """Yield what only developers read: comments, and the docstrings of fields."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield Message(path, token.start[0], "comment", token.string)
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Message(path, node.lineno, "docstring", node.value.value)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""


def _literals(call: ast.Call) -> Iterator[str]:
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        inside = {id(part) for node in ast.walk(argument) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(argument):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            else:
                continue
            if re.search(r"[a-z]+ [a-z]+", text):
                yield text


def main(folders: list[str]) -> None:
    for folder in folders or ["bertopt"]:
        base = ROOT / folder
        for path in sorted(base.rglob("*.py")) if base.is_dir() else [base]:
            for message in messages(path):
                print(message)


if __name__ == "__main__":
    main(sys.argv[1:])
