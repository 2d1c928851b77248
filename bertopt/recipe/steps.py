"""A recipe's steps as a tree: names, parents, and whether each pass can follow its parent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from bertopt import passes
from bertopt.core import Eager, Model, Pass
from bertopt.passes import registry
from bertopt.recipe.messages import format_value
from bertopt.recipe.suggest import nearest
from bertopt.recipe.yaml_document import Document, KeyPath

#: Stage 00, the untouched checkpoint; `after: reference` branches from it.
REFERENCE = "reference"
STEP_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}\Z")
#: Words that mean something else where a step's name could stand.
RESERVED_STEP_NAMES = (REFERENCE, "last", "fastest")

AnyPass = Pass[Any, Any]


@dataclass
class StepDraft:
    """A step while it is checked. What could not be read is None, and no check that needs it says more."""

    index: int
    name: str
    pass_name: str = ""
    cls: type[AnyPass] | None = None
    pass_: AnyPass | None = None
    keys: BaseModel | None = None
    after: Any = None
    """As written; None where it is not."""
    parent: StepDraft | None = None

    @property
    def path(self) -> KeyPath:
        return ("steps", self.index)

    @property
    def label(self) -> str:
        return f"step '{self.name}'" + (f" ({self.pass_name})" if self.pass_name not in ("", self.name) else "")

    @property
    def gives(self) -> type[Model] | None:
        if self.index < 0:
            return Eager
        return self.cls.forms()[1] if self.cls is not None else None

    def line(self) -> list[AnyPass]:
        """The passes from the checkpoint to this one, as far as they are known."""
        return [*(self.parent.line() if self.parent else []), *([self.pass_] if self.pass_ else [])]


def check_names(doc: Document, drafts: Sequence[StepDraft], deliver: str) -> None:
    """Step names differ, and what is delivered is one of them."""
    first: dict[str, StepDraft] = {}
    for draft in drafts:
        if draft.name and first.setdefault(draft.name, draft) is not draft:
            message = f"step name '{draft.name}' is taken by an earlier step; add name: to tell them apart"
            doc.report((*draft.path, "name"), message)
    if deliver not in ("last", "fastest", *first):
        message = f"deliver must be last, fastest or a step's name; got {format_value(deliver)}"
        doc.report(("deliver",), message + nearest(deliver, ["last", "fastest", *first]))


def check_order(doc: Document, drafts: Sequence[StepDraft]) -> None:
    """Find every step's parent, and whether the step can follow it: by form first, then by what the pass says."""
    reference = StepDraft(-1, REFERENCE)
    for index, draft in enumerate(drafts):
        earlier = [reference, *drafts[:index]]
        draft.parent = _parent(doc, draft, earlier, [later.name for later in drafts[index:]])
        if draft.cls is None or draft.parent is None or draft.parent.gives is None:
            continue
        takes = draft.cls.forms()[0]
        if not issubclass(draft.parent.gives, takes):
            given = "the checkpoint is" if draft.parent is reference else f"'{draft.parent.name}' gives"
            wrong = f"takes {_a(takes)} model, but {given} {_a(draft.parent.gives)} one"
            where: KeyPath = (*draft.path, "after") if draft.after is not None else draft.path
            doc.report(where, f"{draft.label} {wrong}; {_instead(draft, takes, earlier)}")
        elif reason := _conflict(draft, draft.parent):
            doc.report(draft.path, f"{draft.label}: {reason}")


def check_inputs(doc: Document, drafts: Sequence[StepDraft], shapes: Sequence[tuple[int, int]], device: str) -> None:
    """Whether each pass can work for the recipe's shapes, and on its device."""
    for draft in drafts:
        if draft.pass_ is None or doc.mistaken(draft.path):
            continue
        with registry.at_work(draft.pass_):
            shape = None if doc.mistaken(("inputs",)) else draft.pass_.shape_conflict(shapes)
            where = draft.parent and draft.pass_.device_conflict(device, draft.parent.line())
        for reason in filter(None, (shape, where)):
            doc.report(draft.path, f"{draft.label}: {reason}")


def _parent(doc: Document, draft: StepDraft, earlier: Sequence[StepDraft], later: Sequence[str]) -> StepDraft | None:
    if doc.mistaken((*draft.path, "after")):
        return None
    if draft.after is None:
        return earlier[-1]
    found = next((step for step in earlier if step.name == draft.after), None)
    if found is None:
        known = [step.name for step in earlier if step.name]
        got = f"got '{draft.after}'"
        if draft.after in later:
            what = f"{got}, which {'is this step itself' if draft.after == draft.name else 'comes later'}; move it up"
        else:
            what = got + nearest(draft.after, known)
        doc.report((*draft.path, "after"), f"{draft.label}: after must name an earlier step; {what}")
    return found


def _conflict(draft: StepDraft, parent: StepDraft) -> str | None:
    if draft.pass_ is None:
        return None
    with registry.at_work(draft.pass_):
        return draft.pass_.conflict(parent.line())


def _instead(draft: StepDraft, takes: type[Model], earlier: Sequence[StepDraft]) -> str:
    """What to do about a step whose form does not fit: the nearest earlier step that would do, or a pass to add."""
    fitting = [step for step in reversed(earlier) if step.gives is not None and issubclass(step.gives, takes)]
    free = [step for step in fitting if not _conflict(draft, step)]
    if fitting:
        return f"{'add' if draft.after is None else 'use'} after: {(free or fitting)[0].name}"
    forms = {name: cls.forms() for name, cls in passes.all_passes().items()}
    makers = [name for name, (needs, gives) in forms.items() if issubclass(gives, takes) and needs is not takes]
    return f"put {' or '.join(makers) or 'a pass that gives one'} before it"


def _a(form: type[Model]) -> str:
    return f"{'an' if form.form[0] in 'aeio' else 'a'} {form.form}"
