"""`python -m campaigns.right_models [CHECKPOINT…] [--texts F] [--out FILE]`: right models, none of which may be refused.

Each model is a real checkpoint as it is, with another head, fewer layers, sharper attention or noisy weights, or a tiny random one of
every family and task, taken through every form that a CPU runs, with the probes of several seeds and several choices of texts (see
`examination`). What is refused here is a fault of the checks: one line a stage, and one object a model in FILE as it ends. Run again
with the same options and code, it goes on behind the models in FILE; all of them take hours.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bertopt.errors import Unsupported
from bertopt.recipe import parser as recipes
from bertopt.stages import source_hash
from bertopt.system import native_import
from bertopt.workers.client import Workers
from campaigns.examination import StageVerdict, examine
from campaigns.mutants.checkpoints import HEADS
from campaigns.mutants.checkpoints import write as write_head
from campaigns.mutants.plant import Checkpoint
from tests.support.tiny_models import CLASSES, WORDS, tasks_of, write_tiny

#: Texts of one draw, and the shapes that are checked besides.
TEXTS, SHAPES = 300, [[1, 16], [4, 32]]
STEPS: tuple[dict[str, Any], ...] = (
    {"pass": "use_sdpa"},
    {"pass": "merge_qkv", "after": "use_sdpa"},
    {"pass": "pack_sequences", "after": "use_sdpa"},
    {"pass": "cast_half", "name": "bf16", "after": "use_sdpa", "dtype": "bfloat16"},
    {"pass": "cast_half", "name": "bf16_autocast", "after": "use_sdpa", "dtype": "bfloat16", "mode": "autocast"},
    {"pass": "cast_half", "name": "fp16", "after": "use_sdpa", "dtype": "float16"},
    {"pass": "cast_half", "name": "bf16_packed", "after": "pack_sequences", "dtype": "bfloat16"},
    {"pass": "export_onnx", "after": "use_sdpa"},
    {"pass": "cast_onnx_half", "name": "fp16_onnx", "after": "export_onnx"},
    {"pass": "fuse_ort", "after": "export_onnx"},
    {"pass": "quantize_int8", "name": "int8", "after": "fuse_ort"},
    {"pass": "quantize_int8", "name": "int8_static", "after": "fuse_ort", "scheme": "static"},
    {"pass": "convert_openvino", "name": "openvino", "after": "export_onnx"},
    {"pass": "convert_openvino", "name": "openvino_bf16", "after": "export_onnx", "precision": "bf16"},
    {"pass": "convert_openvino", "name": "openvino_int8", "after": "export_onnx", "precision": "int8"},
    {"pass": "build_native", "name": "native_int8", "after": "use_sdpa"},
    {"pass": "build_native", "name": "native_bf16", "after": "use_sdpa", "precision": "bf16"},
)
Weights = dict[str, Any]


def as_it_is(weights: Weights, config: dict[str, Any], seed: int) -> None:
    """The checkpoint itself."""


def another_head(weights: Weights, config: dict[str, Any], seed: int) -> None:
    """The task's head is drawn anew; an encoder without one gets other weights in its last layer's output."""
    heads = [name for name in weights if name.startswith("classifier.")]
    last = f"layer.{config['num_hidden_layers'] - 1}.output.dense.weight"
    for name in heads or [name for name in weights if name.endswith(last)]:
        weights[name] = _drawn(weights[name], seed) * (weights[name].std() + 1e-3)


def fewer_layers(weights: Weights, config: dict[str, Any], seed: int) -> None:
    """The upper half of the layers is cut off."""
    kept = config["num_hidden_layers"] = config["num_hidden_layers"] // 2
    for name in list(weights):
        parts = name.split("layer.")
        if len(parts) > 1 and int(parts[1].split(".")[0]) >= kept:
            del weights[name]


def sharper_attention(weights: Weights, config: dict[str, Any], seed: int) -> None:
    """Scores are half as large again."""
    for name in weights:
        if ".attention.self.query." in name:
            weights[name] = weights[name] * 1.5


def noisy_weights(weights: Weights, config: dict[str, Any], seed: int) -> None:
    """Every matrix moves by 2 %, as by a short training run."""
    for name, tensor in weights.items():
        if tensor.dim() == 2 and tensor.is_floating_point():
            weights[name] = tensor + 0.02 * tensor.std() * _drawn(tensor, seed)


VARIANTS: tuple[Callable[[Weights, dict[str, Any], int], None], ...] = (
    as_it_is, another_head, fewer_layers, sharper_attention, noisy_weights,
)  # fmt: skip


def _drawn(like: Any, seed: int) -> Any:
    import torch

    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed))


def write(source: Path, out: Path, variant: Callable[..., None], seed: int) -> Path:
    """Write the checkpoint in `source`, changed by `variant`, to `out`."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out)
    weights, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text("utf-8"))
    variant(weights, config, seed)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config), "utf-8")
    return out


def models(checkpoints: list[Path], tiny: int, scratch: Path, heads: int = 0) -> Iterator[tuple[str, Callable[[], Path]]]:
    """Name every model, and what writes it: variants of the checkpoints, then `tiny` random ones of each family and task, and `heads` of each
    family and other head."""
    out = scratch / "model"
    for variant in VARIANTS:
        for source in checkpoints:
            yield f"{source.name} {variant.__name__}", partial(write, source, out, variant, 0)
    for seed in range(tiny):
        for family in CLASSES:
            for task in tasks_of(family):
                pooling = ("mean", "cls", "splade")[seed % 3] if task == "feature-extraction" else None
                yield f"tiny {family} {task} {seed}", partial(write_tiny, out, family, task, pooling, seed)
    for seed in range(heads):
        for family in CLASSES:
            for head in HEADS:
                of = Checkpoint(family, "token-classification" if head == "entities" else "text-classification", head=head)
                yield f"tiny {family} {head} {seed}", partial(write_head, out, of, seed)


def read_lines(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    lines = path.read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines] if path.suffix == ".jsonl" else lines
    return [" ".join(text.split()) for text in texts if text.strip()]


def draws(lines: list[str] | None, count: int) -> list[list[str]]:
    if lines is None:
        return []
    return [random.Random(seed).sample(lines, min(TEXTS, len(lines))) for seed in range(count)]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="*", type=Path, metavar="CHECKPOINT", help="directories with model.safetensors")
    parser.add_argument("--texts", type=Path, help=".txt or .jsonl to draw texts from; default: the built-in ones alone")
    parser.add_argument("--draws", type=int, default=4, help="choices of texts (default: 4)")
    parser.add_argument("--seeds", type=int, default=8, help="seeds of random probes and sweeps (default: 8)")
    parser.add_argument("--sweeps", type=int, default=2, help="seeds of coverage sweeps (default: 2)")
    parser.add_argument("--tiny", type=int, default=0, metavar="N", help="N tiny random models of each family and task")
    parser.add_argument("--heads", type=int, default=0, metavar="N", help="N tiny random models of each family and other head: several labels, many, one score, …")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one model of N, to sample")
    parser.add_argument("--steps", default="", help="stages to examine, by name and comma; those before them are built")
    parser.add_argument("--recipe", type=Path, help="a recipe whose steps to take instead")
    parser.add_argument("--out", type=Path, help="append the findings here, a JSON object a model; its models of this code and these options are not run again")
    return parser.parse_args()


def verdicts(arguments: argparse.Namespace, name: str, model: Path, out: Path, workers: Workers, lines: list[str] | None) -> Iterator[StageVerdict]:
    """Give the verdict on each stage of one model, and show it."""
    if name.startswith("tiny "):
        lines = [" ".join(random.Random(i).choices(WORDS, k=1 + i % 40)) for i in range(1000)]
    recipe = {
        "schema_version": 1, "model": str(model), "device": "cpu", "inputs": {"shapes": SHAPES},
        "steps": [dict(step, on_fail="skip") for step in steps(arguments.recipe, arguments.steps)],
    }  # fmt: skip
    only = set(filter(None, arguments.steps.split(",")))
    for verdict in examine(recipe, out, workers, arguments.seeds, arguments.sweeps, draws(lines, arguments.draws), only):
        mark, said = "!!" if verdict.refused else "  ", verdict.note or next(iter(verdict.refused.values()), verdict.worst)
        print(f"{mark} {name:44} {verdict.name:16} {len(verdict.refused)} of {verdict.pairs} refused  {said}", flush=True)
        yield verdict


def main() -> int:
    arguments = parsed()
    lines = read_lines(arguments.texts)
    how = {
        "seeds": arguments.seeds, "sweeps": arguments.sweeps, "draws": arguments.draws, "texts": arguments.texts and arguments.texts.name,
        "recipe": arguments.recipe and arguments.recipe.name,
        "steps": arguments.steps, "source": source_hash.of_package("."),
    }  # fmt: skip
    known, examined, refused = earlier(arguments.out, how), 0, 0
    with tempfile.TemporaryDirectory(prefix="bertopt-right-") as scratch, Workers() as workers:
        folder = Path(scratch)
        every = [one for one in models(arguments.checkpoints, arguments.tiny, folder, arguments.heads) if arguments.only in one[0]]
        for name, make in every[:: arguments.every]:
            if name in known:
                pairs, refusals = known[name]
                examined, refused = examined + pairs, refused + refusals
                print(f"   {name:44} {refusals} of {pairs} refused, as {arguments.out} says", flush=True)
                continue
            start = time.monotonic()
            found = list(verdicts(arguments, name, make(), folder / "out", workers, lines))
            examined += sum(one.pairs for one in found)
            refused += sum(len(one.refused) for one in found)
            for path in (folder / "model", folder / "out"):
                shutil.rmtree(path)
            if arguments.out:
                stages = [asdict(one) for one in found]
                record = {"model": name, "how": how, "seconds": round(time.monotonic() - start, 1), "stages": stages}
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
    print(f"{refused} of {examined} examinations of right models refused")
    return 1 if refused else 0


def earlier(out: Path | None, how: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return the examinations and refusals of each model that `out` holds with the options and code `how`."""
    if out is None or not out.exists():
        return {}
    records = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    return {
        one["model"]: (sum(stage["pairs"] for stage in one["stages"]), sum(len(stage["refused"]) for stage in one["stages"]))
        for one in records if one.get("how") == how
    }  # fmt: skip


def steps(recipe: Path | None, names: str) -> list[dict[str, Any]]:
    """Return the steps to take: a recipe's or `STEPS`, of which `names` and those before them."""
    every = recipes.load(recipe).resolved()["steps"] if recipe else [dict(step) for step in STEPS]
    every = [step for step in every if step["pass"] != "build_native" or _native()]
    if not names:
        return every
    by_name, wanted = {step.get("name", step["pass"]): step for step in every}, set[str]()
    for name in names.split(","):
        current: str | None = name
        while current is not None and current in by_name:
            wanted.add(current)
            current = by_name[current].get("after")
    return [step for name, step in by_name.items() if name in wanted]


def _native() -> bool:
    try:
        return bool(native_import.native().supported())
    except Unsupported:
        return False


if __name__ == "__main__":
    sys.exit(main())
