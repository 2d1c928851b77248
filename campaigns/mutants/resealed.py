"""Artefacts whose tokenizer somebody changed and hashed anew, in the name of another version of the libraries: words that no text has.

Such a file was only a warning to `verify --against`, and nothing to `compare`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.commands.compare import compare
from bertopt.commands.verify import verify
from bertopt.report.diff import Tolerances
from campaigns.mutants.plant import EXPORT, LABELS, SDPA, mutant
from campaigns.mutants.tampered import Caught, fresh, resealed, rewritten, tried


def _changed(bench: Any) -> tuple[Path, Path]:
    """A delivered artefact, and another in which two rare letters have each other's id."""
    out, run = fresh(bench, "other_words", LABELS, SDPA, EXPORT)
    assert run().exit_code == 0
    wrong = out / "changed"
    shutil.copytree(out / "artifact", wrong)
    fields = json.loads((wrong / "tokenizer.json").read_text())
    words = fields["model"]["vocab"]
    words["##q"], words["##z"] = words["##z"], words["##q"]
    rewritten(wrong / "tokenizer.json", json.dumps(fields).encode())
    environment = stages.read_manifest(wrong).environment
    resealed(wrong, environment={**environment, "packages": {**environment["packages"], "transformers": "5.5.0"}})
    return out / "artifact", wrong


@mutant("integrity", "")
def resealed_rare_words_of_another_version(bench: Any) -> Caught:
    """Two rare letters have each other's id in a tokenizer that another version is said to have written; `verify --against`."""
    _, wrong = _changed(bench)
    return tried(lambda: verify(wrong, str(bench.checkpoint(LABELS))))


@mutant("integrity", "")
def resealed_rare_words_compared(bench: Any) -> Caught:
    """Two rare letters have each other's id in one of two artefacts; `compare`."""
    right, wrong = _changed(bench)
    return tried(lambda: compare(right, wrong, Tolerances()))
