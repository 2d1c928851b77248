"""Show the worst case of a comparison with its text and tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bertopt.checks.probes import Probe
from bertopt.results import Case, Worst
from bertopt.spec import Text

#: Tokens shown around the worst one, and characters of its text.
WINDOW, LONGEST_TEXT = 64, 1000


def show(worst: Worst, case: Case, probes: Sequence[Probe], word: Callable[[int], str]) -> Worst:
    """Return `worst` with the text and tokens of the row that `case` names, if its probe is one of `probes`.

    `word` returns the spelling of a token id; random probes show ids. Tokens that the mask hides are in brackets.
    """
    probe = next((probe for probe in probes if probe.name == case.probe), None)
    if probe is None or case.row is None:
        return worst
    ids, mask = probe.inputs["input_ids"][case.row], probe.inputs["attention_mask"][case.row]
    valid = np.flatnonzero(mask)
    first, last = (int(valid[0]), int(valid[-1]) + 1) if len(valid) else (0, len(ids))
    at = first if case.token is None else case.token
    start = max(first, min(at - WINDOW // 2, last - WINDOW))
    stop = min(last, start + WINDOW)
    spell = word if probe.texts else str
    tokens = [spell(int(ids[i])) if mask[i] else f"({spell(int(ids[i]))})" for i in range(start, stop)]
    return worst.model_copy(
        update={
            "text": _text(probe.texts[case.row]) if probe.texts else None,
            "tokens": tokens,
            "token": None if case.token is None else case.token - start,
        }
    )


def _text(text: Text) -> str:
    """Return a text, or both of a pair, shortened."""
    whole = text if isinstance(text, str) else " ‖ ".join(text)
    return whole if len(whole) <= LONGEST_TEXT else f"{whole[:LONGEST_TEXT]}…"
