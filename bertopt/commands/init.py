"""`bertopt init`: a commented recipe for one model, to start from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertopt.commands import recipes
from bertopt.commands.optimize import Keep, Target, choose
from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling.config_checks import architecture, head_task, usable_positions
from bertopt.modeling.source import examine, resolve
from bertopt.recipe.parser import parse
from bertopt.recipe.texts import read
from bertopt.system import environment
from bertopt.system.machine import gpu_count

#: Texts whose lengths are measured.
_MOST_TEXTS = 2_000


def init(
    model: str, out: Path = Path("recipe.yaml"), target: Target = "auto", keep: Keep = "fast", texts: Path | None = None,
    revision: str | None = None,
) -> Path:  # fmt: skip
    """Write a commented recipe for `model` (hub id, directory or `pkg://package/path`) to `out` and return its path.

    The steps are those of the shipped recipe for this machine. With `texts` the shapes follow their lengths in tokens.
    `revision` is a branch, tag or commit of a hub model.
    Raises UsageError where `out` exists, or for a model or texts that do not fit.
    """
    if out.exists():
        raise UsageError(f"'{out}' exists; give another name with --out, or remove it")
    directory = resolve(model, revision)
    fields = examine(directory)
    name, _ = choose(target, keep, gpu_count(), environment.versions())
    if texts is not None:
        read(texts)
    text = _text(model, revision, directory, fields, name, texts)
    parse(text, str(out))
    try:
        out.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"'{out}' cannot be written ({error.strerror}); name another place with --out") from error
    return out


def _text(model: str, revision: str | None, directory: Path, fields: Mapping[str, Any], name: str, texts: Path | None) -> str:
    """The recipe: a head written for the model, and the shipped recipe's own lines from `limits:` or `steps:` on."""
    shipped = (recipes.FOLDER / f"{name}.yaml").read_text("utf-8").splitlines()
    top = [number for number, line in enumerate(shipped) if line.startswith(("limits:", "steps:"))]
    device = next((line.split("#")[0].split(":")[1].strip() for line in shipped if line.startswith("device:")), "auto")
    usable = usable_positions(fields)
    task, reason = _task(directory, fields)
    shapes, why = _shapes(directory, usable, texts, task)
    layers = fields.get("num_hidden_layers", fields.get("n_layers", "?"))
    hidden = fields.get("hidden_size", fields.get("dim", "?"))
    positions = f", texts up to {usable} tokens" if usable else ""
    return "\n".join(
        [
            f"# {fields['model_type']}, {layers} layers, hidden size {hidden}{positions}.",
            f"# Written by `bertopt init` from the shipped recipe {name}: {recipes.summary(recipes.FOLDER / f'{name}.yaml')}",
            "# Check it with `bertopt export FILE --dry-run`, run it with `bertopt export FILE`.",
            "schema_version: 1",
            f"model: {json.dumps(model, ensure_ascii=False)}",
            *([] if revision is None else [f"revision: {json.dumps(revision, ensure_ascii=False)}"]),
            f"task: {task}   # {reason}",
            f"device: {device}   # auto, cpu or cuda",
            "inputs:",
            f"  shapes: {json.dumps(shapes)}   # [batch, tokens] to check and time; {why}",
            f"  texts: {json.dumps(str(texts), ensure_ascii=False) if texts else 'null'}   # .txt or .jsonl of yours; null: the built-in texts",
            *shipped[min(top) :],
            "",
        ]
    )


def _task(directory: Path, fields: Mapping[str, Any]) -> tuple[str, str]:
    """The task, and how it is known."""
    if (directory / "modules.json").is_file():
        return "feature-extraction", "a sentence-transformers model: one embedding for each text"
    name = architecture(fields)
    if task := head_task(name) or ("feature-extraction" if name.endswith("Model") else None):
        return task, f"by its architecture, {name}" if name.isidentifier() else "by its architecture"
    return "auto", "config.json names no architecture that tells; state one: bertopt export FILE --set task=…"


def _shapes(directory: Path, usable: int | None, texts: Path | None, task: str) -> tuple[list[list[int]], str]:
    """The shape grid [B, S], and where its lengths come from."""
    lengths = _lengths(directory, texts, task)
    if not lengths:
        short, middle = 16, 128
        why = "the usual ones"
    else:
        short, middle = (_rounded(lengths[math.ceil(share * len(lengths)) - 1]) for share in (0.5, 0.95))
        why = f"half of the texts have at most {short} tokens, 95 % at most {middle}"
    cut = [(batch, min(length, usable or length)) for batch, length in ((1, short), (1, middle), (8, middle))]
    return [list(shape) for shape in dict.fromkeys(cut)], why


def _rounded(length: int) -> int:
    return max(8, -(-length // 8) * 8)


def _lengths(directory: Path, texts: Path | None, task: str) -> Sequence[int]:
    """Sorted token counts of the texts or pairs, or none where the checkpoint has no tokenizer.json to count with."""
    if texts is None or not (directory / "tokenizer.json").is_file():
        return []
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # tokenizers raises Exception itself
        raise IntegrityError(f"tokenizer.json cannot be read ({error}); restore the checkpoint") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    asked = read(texts).asked(task)[:_MOST_TEXTS]
    return sorted(len(tokenizer.encode(*((text,) if isinstance(text, str) else text)).ids) for text in asked)
