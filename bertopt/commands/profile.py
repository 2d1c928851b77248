"""`bertopt profile`: where the time of one call of an artefact goes."""

from __future__ import annotations

from pathlib import Path

from bertopt import stages
from bertopt.debug import OPERATIONS
from bertopt.errors import Unsupported, UsageError
from bertopt.recipe.texts import read
from bertopt.report.profile import Attention, Profile
from bertopt.stages.opening import Opened, opening
from bertopt.system import temporary_directory
from bertopt.workers.client import Workers

#: Forms whose runtime has a profiler.
_PROFILED = ("eager", "compiled", "onnx", "openvino")


def profile(
    directory: Path, texts: Path | None = None, shape: tuple[int, int] | None = None, attention: str | None = None,
    against: str | None = None, key: Path | None = None,
) -> Profile:  # fmt: skip
    """Profile one call of an artefact (or stage) in a fresh process, on texts or on random tokens [B, S].

    With `attention`, a text, add the attention of the checkpoint `against` in fp32, by default the one that the recipe
    names. With the public `key` the artefact must be signed with it. Raises IntegrityError where a file changed, Unsupported where the form has no profiler here, UsageError for a
    shape that does not fit.
    """
    with opening(directory, key) as opened:
        return _profiled(directory, opened, texts, shape, attention, against)


def _profiled(
    directory: Path, opened: Opened, texts: Path | None, shape: tuple[int, int] | None, attention: str | None, against: str | None
) -> Profile:
    """Profile what was opened of `directory`: itself, or a private copy."""
    manifest = opened.manifest
    if manifest.form not in _PROFILED:
        raise Unsupported(
            f"profile looks inside torch, ONNX and OpenVINO forms; '{directory}' is {manifest.form}, which runs all layers in one call: "
            f"bertopt bench times it, bertopt profile {_earlier(directory, manifest)}"
        )
    given = list(read(texts).asked(manifest.spec.task)[:8]) if texts else []
    if shape is not None and shape[1] > manifest.spec.max_length:
        raise UsageError(f"the shape must fit the model's {manifest.spec.max_length} tokens; got {shape[0]} × {shape[1]}")
    checkpoint = None if attention is None else _checkpoint(against or (manifest.recipe or {}).get("model"))
    with Workers() as workers, temporary_directory.make() as scratch:
        with workers.start(OPERATIONS) as worker:
            found = Profile.model_validate(
                worker.call("profile", directory=str(opened.path.resolve()), device=manifest.device,
                            shape=shape, texts=given, scratch=scratch)
            )  # fmt: skip
        found.directory = str(directory)
        if attention is not None:
            with workers.start(OPERATIONS) as worker:
                shown = worker.call("attention", source=str(checkpoint), task=manifest.spec.task, text=attention)
            found.attention = Attention.model_validate(shown)
    return found


def _earlier(directory: Path, manifest: stages.Manifest) -> str:
    """What can be profiled in place of an artefact: the nearest stage before it in its run that has a profiler."""
    after = {step["name"]: step["after"] for step in (manifest.recipe or {}).get("steps", ())}
    name = manifest.stage
    while name in after:
        name = after[name]
        for path in directory.parent.glob(f"stages/{name}-*/{stages.MANIFEST}"):
            if stages.read_manifest(path.parent).form in _PROFILED:
                return f"'{path.parent}' looks inside the stage it was built from"
    return "looks inside an earlier stage of its run, in OUT/stages"


def _checkpoint(source: str | None) -> Path:
    """Return the directory of the checkpoint that attention comes from. Raises UsageError where there is none."""
    from bertopt.modeling.source import examine, resolve

    if not source:
        raise UsageError("attention comes from the fp32 checkpoint, which this directory does not name; give --against CHECKPOINT")
    directory = resolve(source, None)
    examine(directory)
    return directory
