"""`bertopt doctor`: what is wrong with this machine, what it stops, and the command that mends it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from bertopt.commands import recipes
from bertopt.commands.optimize import gpu_recipe
from bertopt.recipe.parser import Recipe, load
from bertopt.system import environment
from bertopt.system.doctor_checks import CHECKS
from bertopt.system.finding import ALL, Finding
from bertopt.system.machine import Machine

Target = Literal["cpu", "gpu"]
#: The recipe that `bertopt doctor --target` stands for: on a GPU the one that `optimize` runs, or this one where nothing for GPUs is installed.
TARGET_RECIPES: dict[Target, str] = {"cpu": "cpu_fastest", "gpu": "ort_cuda_fp16"}


class Diagnosis(BaseModel):
    """The findings that matter to the recipe or target. `exit_code` is 4 if one of them makes it impossible."""

    findings: list[Finding]
    exit_code: int

    def verdict(self, what: str | None) -> str:
        """Return a sentence: whether `what`, the recipe or target that was asked about, can run here; None: what the machine has."""
        count, found = len(self.findings), "; ".join(one.found for one in self.findings if one.blocks or not self.exit_code)
        if what is None:
            return f"this machine: {count or 'no'} problem{'' if count == 1 else 's'} found{', see above' if count else ''}"
        if self.exit_code:
            return f"{what} cannot run here: {found}; correct the errors above, then run doctor again"
        return f"{what} can run here" + (f", with {count} warning{'' if count == 1 else 's'}: {found}" if count else ": no problems found")


def diagnose(machine: Machine, recipe: Recipe | None = None) -> Diagnosis:
    """Run every check on `machine`; with a recipe, keep only what concerns it and decide whether it can work here."""
    found = [finding for check in CHECKS for finding in _listed(check(machine))]
    if recipe is None:
        return Diagnosis(findings=[one for one in found if not one.only_if_needed], exit_code=0)
    needs = _needs(recipe)
    mattering = [one for one in found if needs & set(one.concerns)]
    return Diagnosis(findings=mattering, exit_code=4 if any(one.blocks for one in mattering) else 0)


def asked_recipe(recipe: str | Path | None, target: Target | None) -> Recipe | None:
    """Return the recipe to diagnose for. Raises UsageError where it is no recipe."""
    if recipe is not None:
        return load(recipes.find(recipe), [f"device={'cuda' if target == 'gpu' else 'cpu'}"] if target else ())
    if target is None:
        return None
    preferred = gpu_recipe(environment.versions()) if target == "gpu" else None
    return load(recipes.find(preferred or TARGET_RECIPES[target]))


def _needs(recipe: Recipe) -> set[str]:
    """What must work for the recipe. A step that may fail (`on_fail`) is counted by its pass, not by its precision."""
    needs = {ALL, *(step.pass_.name() for step in recipe.steps)}
    for step in recipe.steps:
        options = step.pass_.model_dump()
        wanted = {str(options.get("dtype", "")), str(options.get("precision", ""))}
        if wanted & {"bf16", "bfloat16"} and step.on_fail == "stop":
            needs.add("bfloat16")
        if "int8" in wanted or step.pass_.name() == "quantize_int8":
            needs.add("int8")
        if step.pass_.name() == "convert_openvino" and "int8" in wanted:
            needs.add("openvino_int8")
    if recipe.device == "cuda":
        needs.add("gpu")
        needs |= {"compile_cuda"} if needs & {"compile_torch", "package_aot"} else set()
        # torch's wheels run without CUDA's headers: a recipe that goes on without the package is no reason to install them.
        needs |= {"package_cuda" for step in recipe.steps if step.pass_.name() == "package_aot" and step.on_fail == "stop"}
        needs |= {"onnx_cuda"} if needs & {"export_onnx"} and "build_tensorrt" not in needs else set()
    if not recipe.model.startswith("pkg://") and not Path(recipe.model).is_dir():
        needs.add("hub")
    return needs


def _listed(found: Finding | list[Finding] | None) -> Iterable[Finding]:
    return [found] if isinstance(found, Finding) else found or []
