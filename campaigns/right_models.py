"""`python -m campaigns.right_models CHECKPOINT… [--texts F] [--draws N] [--json FILE]`: right models, none of which may be refused.

Each case is a checkpoint as it is, with another head, fewer layers, sharper attention or noisy weights, on another choice of
texts, taken through every form that a CPU runs. What is refused here is a fault of the checks: one line a case.
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
from pathlib import Path
from typing import Any

import bertopt
from tests.support.shared_workers import cheap_workers

#: Texts of one draw, and the shapes that are checked besides.
TEXTS, SHAPES = 300, [[1, 16], [4, 32]]
STEPS = (
    {"pass": "use_sdpa"},
    {"pass": "cast_half", "name": "bf16", "dtype": "bfloat16"},
    {"pass": "export_onnx", "after": "use_sdpa"},
    {"pass": "cast_onnx_half", "name": "fp16_onnx"},
    {"pass": "fuse_ort", "after": "export_onnx"},
    {"pass": "quantize_int8", "name": "int8"},
    {"pass": "quantize_int8", "name": "int8_static", "after": "fuse_ort", "scheme": "static"},
    {"pass": "convert_openvino", "name": "openvino_int8", "after": "export_onnx", "precision": "int8"},
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
        if tensor.dim() == 2:
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


def cases(checkpoints: list[Path], draws: int) -> Iterator[tuple[Path, Callable[..., None], int]]:
    """Checkpoint, variant and seed of every case: 5 variants of each checkpoint on `draws` choices of texts."""
    for seed in range(draws):
        for checkpoint in checkpoints:
            for variant in VARIANTS:
                yield checkpoint, variant, seed


def run(source: Path, variant: Callable[..., None], seed: int, lines: list[str] | None, scratch: Path) -> dict[str, Any]:
    """Return what became of one case: the run's exit code, and the stages that were refused, with the reason."""
    start = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=scratch))
    texts = None
    if lines is not None:
        texts = folder / "texts.txt"
        chosen = random.Random(seed).sample(lines, min(TEXTS, len(lines)))
        texts.write_text("\n".join(chosen) + "\n", "utf-8")
    recipe = {
        "schema_version": 1, "model": str(write(source, folder / "model", variant, seed)), "device": "cpu",
        "steps": [dict(step) for step in STEPS], "timing": {"quick": True},
        "inputs": {"shapes": SHAPES, "texts": texts and str(texts)},
    }  # fmt: skip
    report = bertopt.run(recipe, folder / "out")
    refused = {row.name: row.reason for row in report.stages if row.status in ("failed", "noop")}
    ratios = {row.name: round(row.rounding.error_ratio, 3) for row in report.stages if row.rounding}
    shutil.rmtree(folder)
    return {
        "checkpoint": source.name, "variant": variant.__name__, "seed": seed, "exit_code": report.exit_code,
        "refused": refused, "error_ratio": ratios, "seconds": round(time.monotonic() - start, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", type=Path, metavar="CHECKPOINT", help="directories with model.safetensors")
    parser.add_argument("--texts", type=Path, help=".txt or .jsonl to draw texts from; default: the built-in ones")
    parser.add_argument("--draws", type=int, default=4, help="choices of texts (default: 4, which makes 40 cases of 2 checkpoints)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one case of N, to sample")
    parser.add_argument("--json", type=Path, help="write the findings here")
    arguments = parser.parse_args()
    lines = None
    if arguments.texts:
        raw = arguments.texts.read_text("utf-8").splitlines()
        lines = [json.loads(line)["text"] for line in raw] if arguments.texts.suffix == ".jsonl" else raw
        lines = [" ".join(line.split()) for line in lines if line.strip()]
    found = []
    with tempfile.TemporaryDirectory(prefix="bertopt-right-") as scratch, cheap_workers("pipeline"):
        for checkpoint, variant, seed in list(cases(arguments.checkpoints, arguments.draws))[:: arguments.every]:
            found.append(run(checkpoint, variant, seed, lines, Path(scratch)))
            one = found[-1]
            mark = "  " if one["exit_code"] == 0 else "!!"
            print(f"{mark} {one['checkpoint']:24} {one['variant']:18} texts {seed}  exit {one['exit_code']}  "
                  f"{one['seconds']:6.1f} s  {one['refused'] or one['error_ratio']}", flush=True)  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    refused = sum(one["exit_code"] != 0 for one in found)
    print(f"{refused} of {len(found)} right models refused")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
