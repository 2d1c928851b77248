"""Attribute unexpected errors to a user's own passes where these took part in a stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bertopt import stages
from bertopt.core import Pass
from bertopt.errors import BertoptError, PassFailed, WorkerRaised
from bertopt.passes import registry


def explained(error: BertoptError, by: Pass[Any, Any], parent: Path) -> BertoptError:
    """Return `error`, which came up with the stage that `by` makes from the one in `parent`, or a PassFailed instead of it.

    If the error is unexpected and passes that are not part of bertopt took part, it need not be a bug of bertopt: the last of them is named.
    """
    if not isinstance(error, WorkerRaised):
        return error
    names = [*(record.name for record in stages.read_manifest(parent).passes), by.name()]
    foreign = [name for name in names if not registry.is_own(registry.require(name))]
    if not foreign:
        return error
    return PassFailed(
        f"{error}; pass '{foreign[-1]}', which is not part of bertopt, made this model or one that it comes from: mend the pass, or run "
        "the recipe without it to see whether bertopt is at fault",
        error.log,
    )
