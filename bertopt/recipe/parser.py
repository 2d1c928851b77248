"""YAML to Recipe, every mistake reported at once with file:line:column. Nothing heavy is imported."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, model_validator

from bertopt import passes
from bertopt.core import RESERVED_KEYS, Pass, Precision, Task
from bertopt.errors import UsageError
from bertopt.modeling.source import HUB_ID
from bertopt.recipe import waivers
from bertopt.recipe.messages import format_value, validate_model
from bertopt.recipe.overrides import apply as apply_overrides
from bertopt.recipe.steps import (
    REFERENCE,
    RESERVED_STEP_NAMES,
    STEP_NAME,
    StepDraft,
    check_inputs,
    check_names,
    check_order,
)
from bertopt.recipe.suggest import closest, nearest
from bertopt.recipe.yaml_document import Document, KeyPath
from bertopt.results import Limits, Waiver

Size = Annotated[int, Field(ge=1)]
Shapes = tuple[tuple[Size, Size], ...]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Inputs(_Frozen):
    """What the stages are checked and timed on."""

    shapes: Shapes = Field(((1, 16), (1, 128), (8, 128)), min_length=1, description="[batch, sequence] grid")
    texts: str | None = Field(None, description=".txt or .jsonl ({text, label}); null: the built-in probe texts")


class Timing(_Frozen):
    """Time limits of the comparisons. A race ends sooner once its intervals are narrow; a noisy machine needs longer."""

    shape_s: float = Field(2.5, gt=0, description="most seconds for each shape of the grid, all contenders together")
    mix_s: float = Field(4.0, gt=0, description="most seconds of timing texts end to end, all contenders together")
    quick: bool = Field(False, description="a first look: few rounds of timing, so wide intervals; parity in full")

    @model_validator(mode="before")
    @classmethod
    def _without_removed_keys(cls, given: Any) -> Any:
        """Accept the keys of version 0.1 for one release."""
        removed = [key for key in ("narrow", "processes") if isinstance(given, dict) and key in given]
        for key in removed:
            warnings.warn(f"timing.{key} has no effect any more and will be an error; remove it", FutureWarning, stacklevel=2)
        return {key: value for key, value in given.items() if key not in removed} if removed else given


class StepKeys(_Frozen):
    """The reserved keys of a step that stand for themselves."""

    limits: Limits = Field(Limits(), description="parity limits of this step, over the recipe's")
    on_fail: Literal["stop", "revert", "skip"] = Field(
        "stop", description="revert: drop this stage and go on from its parent; skip: end this branch, the others go on"
    )
    allow_noop: bool = Field(False, description="a pass that changes nothing does not fail the run")
    timeout: float = Field(1800.0, gt=0, description="seconds the pass may take")


class Step(StepKeys):
    """One pass in the tree. `after` is the name of the stage it starts from; None is the checkpoint."""

    name: str
    pass_: SkipValidation[Pass[Any, Any]]
    after: str | None


class RecipeFields(_Frozen):
    """Everything but the steps."""

    schema_version: Literal[1] = Field(description="version of this format")
    model: str = Field(min_length=1, description="hub id, directory, or pkg://importable.package/path/inside")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    task: Literal["auto", Task] = Field("auto", description="auto: from the checkpoint")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is a usable GPU")
    inputs: Inputs = Inputs()
    timing: Timing = Timing()
    limits: dict[Precision, Limits] = Field({}, description="parity limits by precision, over the defaults")
    deliver: str = Field("last", description="last, fastest or a step's name")
    waivers: tuple[Waiver, ...] = Field((), description="limits that stages are known to miss, until a day")


class Recipe(RecipeFields):
    """A checked recipe: the steps' passes are constructed, their order fits."""

    steps: tuple[Step, ...] = Field(min_length=1)

    def resolved(self) -> dict[str, Any]:
        """The recipe with every default filled in, JSON-ready; `from_dict` reads it back."""
        data = self.model_dump(mode="json", exclude={"steps", "limits", "deliver", "waivers"})
        data["limits"] = {kind: limits.model_dump(exclude_none=True) for kind, limits in self.limits.items()}
        data["steps"] = [
            {"pass": step.pass_.name(), "name": step.name, "after": step.after or REFERENCE}
            | step.model_dump(mode="json", include=set(StepKeys.model_fields), exclude_none=True)
            | step.pass_.model_dump(mode="json")
            for step in self.steps
        ]
        data["deliver"] = self.deliver
        data["waivers"] = [waiver.model_dump(mode="json") for waiver in self.waivers]
        return data

    def step(self, name: str) -> Step | None:
        """Return the step of this name, for "last" the last one; None for "reference" and "fastest", which are no step's."""
        return self.steps[-1] if name == "last" else next((step for step in self.steps if step.name == name), None)


#: Bytes; a recipe has a few thousand.
LARGEST_FILE = 2**20


def load(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe in a file, with `--set` values applied. Raises UsageError with every mistake found."""
    try:
        size = Path(path).stat().st_size
        if size > LARGEST_FILE:
            raise UsageError(f"{path}: a recipe must be at most {LARGEST_FILE} bytes; got {size}; give another file")
        text = Path(path).read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror}); give the path of a recipe") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: must be UTF-8 text; byte {error.start} is not") from error
    return parse(text, str(path), overrides)


def parse(text: str, source: str = "<text>", overrides: Sequence[str] = ()) -> Recipe:
    """Like `load` for text; relative paths are also looked for beside `source`."""
    return _recipe(Document.read(text, source), overrides)


def from_dict(data: Mapping[str, Any], source: str = "<dict>", overrides: Sequence[str] = ()) -> Recipe:
    """Like `load` for plain data; mistakes name the key's path instead of a line."""
    try:
        text = json.dumps(data, default=os.fspath, allow_nan=False, ensure_ascii=False)
        text.encode()  # refuses halves of surrogate pairs
        plain = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{source}: expected only text, finite numbers, booleans, None, lists, dicts; {error}") from error
    return _recipe(Document(source, plain), overrides)


def _recipe(doc: Document, overrides: Sequence[str]) -> Recipe:
    if not isinstance(doc.data, dict):
        doc.report((), f"a recipe is a mapping with schema_version, model and steps; got {format_value(doc.data)}")
        doc.raise_problems()
    apply_overrides(doc, overrides)
    # A key whose entries are all commented out reads as null.
    top = {key: value for key, value in doc.data.items() if key not in ("inputs", "timing", "limits") or value is not None}
    steps, waived = top.pop("steps", None), top.pop("waivers", None)
    fallbacks = {"schema_version": 1, "model": "none"}
    head = validate_model(RecipeFields, top, doc, (), fallbacks=fallbacks, other_keys=["steps", "waivers"])
    assert head is not None, "every field has a default or a fallback"
    if not isinstance(steps, list) or not steps:
        if "steps" in doc.data or not any(closest(key, ["steps"]) for key in top):
            doc.report(("steps",), f"steps must be a list with at least one '- pass: NAME'; got {format_value(steps)}")
        steps = []
    drafts = [_draft(doc, index, step) for index, step in enumerate(steps)]
    check_names(doc, drafts, head.deliver)
    check_order(doc, drafts)
    check_inputs(doc, drafts, head.inputs.shapes, head.device)
    head = _located(doc, head, Path(doc.source).parent)
    waiving = waivers.read(doc, waived, [draft.name for draft in drafts if draft.name])
    doc.raise_problems()
    return Recipe(**dict(head) | {"waivers": waiving}, steps=tuple(_step(draft) for draft in drafts))


def _draft(doc: Document, index: int, data: Any) -> StepDraft:
    path: KeyPath = ("steps", index)
    if not isinstance(data, dict):
        doc.report(path, f"a step must be a mapping such as '- pass: use_sdpa'; got {format_value(data)}")
        return StepDraft(index, data if isinstance(data, str) else "")
    pass_name = data["pass"] if isinstance(data.get("pass"), str) else ""
    name = data.get("name", pass_name)
    draft = StepDraft(index, name if isinstance(name, str) else pass_name, pass_name, after=data.get("after"))
    who = f"{draft.label}: "
    if "after" in data and not isinstance(draft.after, str):
        doc.report((*path, "after"), f"{who}after must be a step's name or '{REFERENCE}'; got {format_value(draft.after)}")
    if "name" in data and (not isinstance(name, str) or not STEP_NAME.match(name) or name in RESERVED_STEP_NAMES):
        rule = "must be letters, digits, '_' and '-' (64 at most), start with a letter"
        doc.report((*path, "name"), f"{who}name {rule} and be none of {', '.join(RESERVED_STEP_NAMES)}; got {format_value(name)}")
    keys = {key: data[key] for key in StepKeys.model_fields if key in data and (key, data[key]) != ("limits", None)}
    draft.keys = validate_model(StepKeys, keys, doc, path, who)
    options = {key: value for key, value in data.items() if key not in RESERVED_KEYS}
    draft.cls = passes.get(pass_name) if pass_name else None
    if draft.cls is None:
        _report_no_pass(doc, path, data)
    else:
        draft.pass_ = validate_model(draft.cls, options, doc, path, who, noun="option", other_keys=RESERVED_KEYS)
    return draft


def _report_no_pass(doc: Document, path: KeyPath, data: Mapping[str, Any]) -> None:
    """Report a step whose pass is unknown or not named."""
    if "pass" in data:
        got = data["pass"]
        doc.report((*path, "pass"), f"unknown pass {format_value(got)}{nearest(str(got), passes.all_passes())}")
        return
    typo = next((key for key in data if key not in RESERVED_KEYS and closest(key, ["pass"])), None)
    message = f"unknown key '{typo}'; did you mean 'pass'?" if typo else "a step must name its pass; add pass: NAME"
    doc.report((*path, typo or "pass"), message, key=True)


def _step(draft: StepDraft) -> Step:
    assert draft.pass_ is not None and draft.keys is not None and draft.parent is not None
    after = None if draft.parent.name == REFERENCE else draft.parent.name
    return Step(name=draft.name, pass_=draft.pass_, after=after, **dict(draft.keys))


def _located(doc: Document, head: RecipeFields, folder: Path) -> RecipeFields:
    """Local paths as they can be opened from here: relative ones count from here, else from the recipe's folder."""
    found: dict[str, str] = {}
    texts, model = head.inputs.texts, head.model
    if texts is not None:
        where = _find(texts, folder, Path.is_file)
        if Path(texts).suffix not in (".txt", ".jsonl"):
            doc.report(("inputs", "texts"), f"inputs.texts must be a .txt or .jsonl file; got {format_value(texts)}")
        elif where is None:
            doc.report(
                ("inputs", "texts"), f"inputs.texts: no file {format_value(texts)} here or beside the recipe; check the path"
            )
        found["texts"] = where or texts
    if not model.startswith("pkg://"):
        where = _find(model, folder, Path.is_dir)
        if where is None and (model[0] in "./~" or not HUB_ID.fullmatch(model)):
            expected = "model must be a hub id such as 'org/name', a directory or pkg://package/path"
            doc.report(("model",), f"{expected}; got {format_value(model)}, and there is no such directory")
        model = where or model
    return head.model_copy(update={"model": model, "inputs": head.inputs.model_copy(update=found)})


def _find(value: str, folder: Path, there: Callable[[Path], bool]) -> str | None:
    for written in (value, str(folder / value)):
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # too long, a NUL inside, the home of nobody
            if there(path := Path(written).expanduser()):
                return str(path)
    return None
