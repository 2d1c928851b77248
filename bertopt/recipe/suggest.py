"""Suggest what a mistyped word could have been."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` resembles, or None."""
    words = list(known)
    found = difflib.get_close_matches(word[:100], words, n=1) or difflib.get_close_matches(word[:100].lower(), words, n=1)
    return next(iter(found), None)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return what to do about an unknown word: the known one it resembles, or all of them."""
    words = list(dict.fromkeys(known))
    close = closest(word, words)
    return f"; did you mean '{close}'?" if close else f"; known: {', '.join(words) or 'none'}"
