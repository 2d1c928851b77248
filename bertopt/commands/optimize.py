"""`bertopt.optimize`: choose the shipped recipe for this machine and run it for a model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from bertopt.commands import recipes
from bertopt.commands.export import run
from bertopt.errors import Unsupported, UsageError
from bertopt.modeling.config_checks import cut_shapes
from bertopt.modeling.source import examine, resolve
from bertopt.recipe.parser import Recipe, from_dict, load
from bertopt.recipe.texts import read
from bertopt.system import environment
from bertopt.system.machine import gpu_count

if TYPE_CHECKING:
    from bertopt.results import Report

Target = Literal["auto", "cpu", "gpu"]
Keep = Literal["exact", "near-lossless", "fast"]

_CPU: dict[Keep, str] = {"exact": "cpu_exact", "near-lossless": "cpu_near_lossless", "fast": "cpu_fastest"}
#: GPU recipes, the preferred one first, by the package that runs what they build.
_GPU = {"onnxruntime-gpu": "ort_cuda_fp16", "tensorrt": "trt_fp16", "torch": "gpu_fastest"}
_NOTHING = "none of onnxruntime-gpu, tensorrt and a CUDA build of torch is installed"
#: Builds of torch, by the end of their version, that do not use NVIDIA's GPUs.
_OTHER_TORCH = ("cpu", "rocm", "xpu")
#: What `near-lossless` promises, beyond the default limits; `cpu_near_lossless` states it, and the GPU recipes, which are those of `fast`, do not.
_NEAR_LOSSLESS = {"cosine_mean": 0.9999}


@dataclass(frozen=True)
class Plan:
    """What `optimize` does: a recipe, the shipped one that it came from, where the result goes, and remarks on the choice."""

    recipe: Recipe
    name: str
    out: Path
    notes: tuple[str, ...] = ()


def optimize(
    model: str | Path, target: Target = "auto", keep: Keep = "fast", texts: str | Path | None = None, out: str | Path | None = None,
    task: str = "auto", portable: bool = False, quick: bool = False, progress: bool = False,
    listen: Callable[[Report], None] | None = None, revision: str | None = None,
) -> Report:  # fmt: skip
    """Optimise `model` (hub id, directory or `pkg://package/path`) for this machine and return the report.

    `keep` says how close the artefact must stay to the checkpoint: 'exact' (float32, 1e-4), 'near-lossless' (16 bits, mean
    cosine 0.9999) or 'fast' (INT8, within its limits). `texts` (.txt or .jsonl) are yours: ranges and speed are measured on
    them. `portable` delivers an artefact that sentence-transformers can open, too. `quick` shortens the timing.
    `revision` is a branch, tag or commit of a hub model. Leaves artefact and report in `out`, by default `out/<model's name>`.
    Raises as `bertopt.run` does, and Unsupported where `target` is not available here.
    """
    chosen = plan(model, target, keep, texts, out, task, portable, quick, revision)
    return run(chosen.recipe, chosen.out, progress=progress, listen=listen)


def plan(
    model: str | Path, target: Target = "auto", keep: Keep = "fast", texts: str | Path | None = None, out: str | Path | None = None,
    task: str = "auto", portable: bool = False, quick: bool = False, revision: str | None = None,
) -> Plan:  # fmt: skip
    """Return what `optimize` would do. Starts nothing; raises UsageError and the like for a model or texts that do not fit."""
    model = os.fspath(model)
    # What torch alone runs opens in bertopt alone.
    packages = {package: version for package, version in environment.versions().items() if not (portable and package == "torch")}
    name, notes = choose(target, keep, gpu_count(), packages)
    if texts is not None:
        if not isinstance(texts, str | os.PathLike):
            raise TypeError(f"texts must be the path of a .txt or .jsonl file; got {type(texts).__name__}: write your texts to one")
        _check_texts(Path(texts))
    fields = examine(resolve(model, revision))
    data = load(recipes.find(recipes.FOLDER / f"{name}.yaml")).resolved()
    data |= {"model": model, "revision": revision, "task": task}
    data["inputs"] |= {"texts": None if texts is None else str(texts), "shapes": [list(shape) for shape in cut_shapes(fields, data["inputs"]["shapes"])]}
    if name == "trt_fp16":
        data["device"] = "cuda"  # never ahead of time for another GPU
    if keep == "near-lossless" and name in _GPU.values():
        data["steps"] = [_in_float16(step) for step in without(data["steps"], "quantize_fp8")]
        data["limits"]["float16"] = data["limits"].get("float16", {}) | _NEAR_LOSSLESS
    if portable:
        data["steps"] = without(without(data["steps"], "pack_sequences"), "build_native")
    if quick:
        data["timing"]["quick"] = True
    return Plan(from_dict(data, name), name, Path(out) if out is not None else Path("out") / short_name(model), notes)


def choose(target: Target, keep: Keep, gpus: int, packages: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the shipped recipe for a machine with `gpus` GPUs and these `packages`, and remarks on the choice.

    Raises Unsupported if `target` is 'gpu' and there is none, or nothing that uses it; UsageError for `keep='exact'` on one, and
    for other words.
    """
    for option, given, known in (("target", target, get_args(Target)), ("keep", keep, get_args(Keep))):
        if given not in known:
            raise UsageError(f"{option} must be one of {', '.join(known)}; got {given!r}")
    on_gpu = gpu_recipe(packages)
    usable = bool(gpus and on_gpu)
    if target == "gpu" and not usable:
        what = "no NVIDIA GPU is here" if not gpus else f"{_NOTHING}: pip install 'bertopt[gpu]'"
        raise Unsupported(f"target gpu cannot be used: {what}; `bertopt doctor --target gpu` says more; or use --target cpu")
    if target == "gpu" and keep == "exact":
        raise UsageError("keep must be near-lossless or fast on a GPU, whose recipes compute in half precision; got exact")
    if target == "cpu" or not usable or keep == "exact":
        note = f"a GPU is here, but {_NOTHING}" if keep != "exact" else "no GPU recipe is exact"
        aside = target == "auto" and gpus > 0
        return _CPU[keep], (f"{note}: optimising for the CPU",) if aside else ()
    assert on_gpu is not None
    return on_gpu, ()


def gpu_recipe(packages: Mapping[str, str]) -> str | None:
    """Return the shipped recipe for a GPU whose artefact one of these `packages` runs, the preferred one; None without such a package."""
    return next((recipe for package, recipe in _GPU.items() if _uses_gpu(package, packages)), None)


def _uses_gpu(package: str, packages: Mapping[str, str]) -> bool:
    """Whether a package is installed that runs artefacts on NVIDIA's GPUs, as far as its version tells."""
    return package in packages and not (package == "torch" and packages[package].partition("+")[2].startswith(_OTHER_TORCH))


def _in_float16(step: dict[str, Any]) -> dict[str, Any]:
    """The step with bfloat16, which misses the limit, replaced by float16."""
    return step | {"dtype": "float16"} if step.get("dtype") == "bfloat16" else step


def short_name(model: str) -> str:
    """Return the last part of a model's name: what its output directory is called."""
    if model.startswith("pkg://"):
        return model.removeprefix("pkg://").split("/")[0]
    return Path(model).expanduser().resolve().name or "model"


def without(steps: list[dict[str, Any]], pass_name: str) -> list[dict[str, Any]]:
    """Return `steps` without those of one pass and all that start from them."""
    dropped: set[str] = set()
    for step in steps:
        if step["pass"] == pass_name or step["after"] in dropped:
            dropped.add(step["name"])
    return [step for step in steps if step["name"] not in dropped]


def _check_texts(path: Path) -> None:
    if path.suffix not in (".txt", ".jsonl"):
        raise UsageError(f"texts must be a .txt or .jsonl file; got '{path}'")
    if not path.is_file():
        raise UsageError(f"texts: there is no file '{path}'; check the path")
    read(path)
