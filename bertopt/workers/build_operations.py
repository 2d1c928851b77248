"""A worker's operations that need no open stage: describe the GPU, load a checkpoint, build a stage."""

from __future__ import annotations

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsInt, get_args

from bertopt import stages
from bertopt.core import Context, Pass, Precision, Result, Rewrite
from bertopt.errors import CheckpointWarning, PassFailed
from bertopt.passes import registry
from bertopt.runtime import text_inputs
from bertopt.runtime.tokenization import Tokenizer
from bertopt.stages.manifest import GpuEntry
from bertopt.system import gpu
from bertopt.system.untrusted import plain, reading

if TYPE_CHECKING:
    from bertopt.core import Array

Reply = tuple[Any, dict[str, "Array"]]


class BuildOps:
    """The operations that need no open stage."""

    def op_device(self, arrays: Any) -> Reply:
        """Return the GPU that CUDA sees on this machine."""
        import torch

        if not torch.cuda.is_available():
            return {"cuda": False, "gpu": None}, {}
        state = gpu.state()
        found = GpuEntry(
            name=torch.cuda.get_device_name(), capability=gpu.capability(), driver=gpu.driver(), cuda_version=torch.version.cuda
        )
        refused = state.compute_mode if state is not None and state.refuses_second_process else None
        return {"cuda": True, "gpu": found.model_dump(), "refuses_second_process": refused}, {}

    def op_load_checkpoint(self, arrays: Any, source: str, task: str, part: str, fields: dict[str, Any]) -> Reply:
        """Load and check a checkpoint; write stage 00 to the directory `part`."""
        from bertopt.modeling import checkpoint
        from bertopt.modeling.tokenizer import open_tokenizer
        from bertopt.runtime import same_tokens

        start = time.monotonic()
        out = Path(part)
        with reading("the checkpoint", "restore it, or give another one"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = checkpoint.load(source, task)
            checkpoint.write_snapshot(model, out)
            theirs = open_tokenizer(model.checkpoint)
            theirs = getattr(theirs, "converted_from", theirs)
            same_tokens.check(Tokenizer(out, model.spec), theirs)
            same_tokens.warn_of_class(model.checkpoint, theirs)
        (out / "rewrites.json").write_text("[]\n")
        entry = stages.describe(model)
        notes = sorted({str(w.message) for w in caught if issubclass(w.category, CheckpointWarning)})
        built = {"changes": {}, "build_s": time.monotonic() - start, "warnings": notes}
        stages.write_manifest(out, {**fields, **entry, **built})
        return None, {}

    def op_build(
        self, arrays: Any, parent: str, record: dict[str, Any], part: str,
        context: dict[str, Any], fields: dict[str, Any],
    ) -> Reply:  # fmt: skip
        """Run one pass on the stage `parent`; write the new stage to the directory `part`."""
        from bertopt.modeling.checkpoint import quiet
        from bertopt.stages import sources

        rewrite = Rewrite.model_validate(record)
        apply = registry.restore(rewrite)
        manifest = stages.read_manifest(Path(parent))
        model = stages.open_stage(Path(parent), manifest)
        out = Path(part)
        shapes = tuple((int(b), int(s)) for b, s in context["shapes"])
        tokenizer = functools.cache(lambda: Tokenizer(Path(parent), model.spec))

        def encode(texts: Sequence[Any]) -> dict[str, Array]:
            return tokenizer().batch(tokenizer().encode(texts))

        ctx = Context(out, context["device"], shapes, tuple(text_inputs.from_json(context["texts"])), context["seed"], encode)
        start = time.monotonic()
        read = dict[str, str]()
        with quiet(), sources.reading(apply, [Path(parent), out], read), registry.at_work(apply):
            result = apply(model, ctx)
        check_result(apply, result)
        if changed := model.spec.differences(result.model.spec):
            raise _fault(apply)(f"pass '{rewrite.name}' must keep what the model takes and says; it changed {changed}")
        stages.inherit(Path(parent), out)
        stages.write_form(result.model, out)
        built = {
            "changes": {} if result.model is model else {k: int(v) for k, v in result.changes.items()},
            "build_s": time.monotonic() - start,
            "passes": [*(record.model_dump() for record in manifest.passes), rewrite.model_dump()],
            "sources": {**(manifest.sources or {}), **sources.record([rewrite.name]), **read},
        }
        stages.write_manifest(out, {**fields, **stages.describe(result.model), **built})
        return None, {}


def check_result(by: Pass[Any, Any], result: Any) -> None:
    """Raise PassFailed (TypeError for bertopt's own passes) where a pass returned something that it must not return."""
    name, given, wrong = by.name(), by.forms()[1], _fault(by)
    if not isinstance(result, Result):
        raise wrong(
            f"pass '{name}' must return a Result, such as model.rewritten(self) or Result(model, {{'layers': 6}}); got {type(result).__name__}"
        )
    if not isinstance(result.model, given):
        raise wrong(f"pass '{name}' must give {given.__name__}; it gave {type(result.model).__name__}")
    if result.model.precision not in get_args(Precision):
        raise wrong(f"pass '{name}' must give a model whose precision is {', '.join(get_args(Precision))}; got {plain(repr(result.model.precision))}")
    if isinstance(result.model, stages.FileModel):
        _check_files(name, result.model, wrong)
    changes: Any = result.changes
    if not isinstance(changes, Mapping) or not all(isinstance(count, SupportsInt) for count in changes.values()):
        got = plain(repr(dict(changes))) if isinstance(changes, Mapping) else type(changes).__name__
        raise wrong(f"pass '{name}' must count what it changed and return that, such as {{'layers': 6}}, from rewrite or in its Result; got {got}")


def _check_files(name: str, model: stages.FileModel, wrong: type[Exception]) -> None:
    if not isinstance(model.path, Path):
        raise wrong(f"pass '{name}' must give a model whose path is a pathlib.Path; got {plain(repr(model.path))}")
    missing = [path for path in [model.path] if not path.is_file()] or [path for path in stages.files_beside(model) if not path.exists()]
    if missing:
        raise wrong(f"pass '{name}' must write the files of the model that it gives, or keep its parent's; '{missing[0]}' is not there")


def _fault(by: Pass[Any, Any]) -> type[Exception]:
    return TypeError if registry.is_own(type(by)) else PassFailed
