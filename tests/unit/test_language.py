"""Docstrings, messages and comments are plain English: phrases that only their author understands do not come back."""

from __future__ import annotations

import re

from tests.support.messages import ROOT, comments, messages

#: See "Language" in CONTRIBUTING.md: what to say instead stands beside each.
FORBIDDEN = {
    r"\ba side\b": "per contender",
    r"\bwithheld\b": "CPU steal",
    r"\bof its own\b": "leave it out, or say separate",
    r"\bso many\b": "give the number",
    r"\bmeanwhile\b": "while …",
    r"\bis told\b": "is called with",
    r"\bis asked\b": "is called, is read",
    r"\bits company\b": "the other texts in the batch",
    r"\bmood\b": "conditions",
    r"\bcarr(y|ies|ied) (it|them)? ?out\b": "run",
    r"(?<!there )\bis no (bertopt|report|JSON|local|writable)\b": "is not a …",
}


def test_messages_docstrings_and_comments_are_plain() -> None:
    unclear = []
    for path in sorted((ROOT / "bertopt").rglob("*.py")):
        unclear += [
            f"{message} (say: {instead})"
            for message in (*messages(path), *comments(path))
            for phrase, instead in FORBIDDEN.items()
            if re.search(phrase, message.text, re.IGNORECASE)
        ]
    assert unclear == []


def test_messages_are_found() -> None:
    texts = [message.text for message in messages(ROOT / "bertopt" / "commands" / "optimize.py")]
    assert any("there is no file '{}'" in text for text in texts) and any(text.startswith("Optimise `model`") for text in texts)
