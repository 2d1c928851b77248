"""Part `smoke`: what this device can do at most, and whether what the other parts rely on works here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu import models, package_stages, pytest_rows
from benchmarks.gpu import setting as shared
from benchmarks.gpu.setting import Missing, Setting

Row = dict[str, Any]
#: [M, K, N]: large squares, and the two products of BERT-base's and BERT-large's feed-forward at 16,384 tokens.
GEMMS = ((8192, 8192, 8192), (16384, 768, 3072), (16384, 3072, 768), (16384, 1024, 4096))
QUICK_GEMMS = ((256, 256, 256),)
KINDS = ("float32", "tf32", "bfloat16", "float16", "float8", "float8_fast")
#: Tokens of one text whose vectors are added, and kernels of a graph that do nearly nothing.
BAGS, NODES = (128, 512, 8192), 100
#: Attention of 512 texts of 64 tokens: places for texts and the longest text that it is started for, whose blocks without work return at once.
PLACES = ((512, 64), (512, 512), (1024, 512), (2048, 512))
#: Lengths that a served model meets; on CUDA memory-efficient attention pads masks to multiples of 8.
GRAPH_LENGTHS = (7, 8, 16, 23, 33, 64, 65, 100, 128, 200, 256, 384)
RACES, RACES_OF_A_PAIR = 20, 4
#: Words for pytest where a plugin is installed: several tests at once, and an end to each that hangs.
_PLUGINS = {"xdist": ("-n", "4"), "pytest_timeout": ("--timeout", "240")}


def cases(quick: bool) -> list[str]:
    return [name for name in CASES if not (quick and name == "package")]


def run(case: str, setting: Setting) -> Iterator[Row]:
    yield from CASES[case](setting)


def peaks(setting: Setting) -> Iterator[Row]:
    import torch

    device = shared.on(setting.device)
    for kind in KINDS:
        for m, k, n in QUICK_GEMMS if setting.quick else GEMMS:
            key = f"{kind}-{m}x{k}x{n}"
            if key in setting.done:
                continue
            try:
                product = _product(kind, m, k, n, device)
                product()
            except (RuntimeError, ValueError, AttributeError, NotImplementedError) as error:
                yield {"key": key, "kind": kind, "missing": str(error).splitlines()[0][:200]}
                continue

            def step(product: Callable[[], Any] = product) -> None:
                product()
                shared.synchronize(setting.device)

            timed = shared.time_ms(step, setting)
            yield {"key": key, "kind": kind, "shape": [m, k, n], "tflops": 2e-9 * m * k * n / timed["p50_ms"], **timed}
    torch.set_float32_matmul_precision("highest")


def _product(kind: str, m: int, k: int, n: int, device: Any) -> Callable[[], Any]:
    import torch

    torch.set_float32_matmul_precision("high" if kind == "tf32" else "highest")
    if kind == "tf32" and device.type != "cuda":
        raise ValueError("TF32 is of NVIDIA GPUs")
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if kind in ("float8", "float8_fast"):
        high = torch.finfo(torch.float8_e4m3fn).max
        scale_a = (a.abs().amax(dim=1, keepdim=True) / high).float()
        scale_b = (b.abs().amax(dim=1, keepdim=True) / high).float()
        a8, b8 = (a / scale_a).to(torch.float8_e4m3fn), (b / scale_b).to(torch.float8_e4m3fn)
        # Sums in fewer bits between the additions in float32; quantize_fp8 does not ask for that.
        fast = kind == "float8_fast"
        return lambda: torch._scaled_mm(a8, b8.T, scale_a=scale_a, scale_b=scale_b.T, out_dtype=torch.bfloat16, use_fast_accum=fast)
    dtype = torch.float32 if kind == "tf32" else getattr(torch, kind)
    a, b = a.to(dtype), b.to(dtype)
    return lambda: torch.mm(a, b.T)


def copies(setting: Setting) -> Iterator[Row]:
    """Bytes read and written on the device, and moved from pinned and pageable host memory."""
    import torch

    device = shared.on(setting.device)
    size = (1 << 20) if setting.quick else (1 << 30)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    other = torch.empty_like(there)
    sources = {"device": there, "pageable": torch.empty(size, dtype=torch.uint8)}
    if setting.device == "cuda":
        sources["pinned"] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for name, source in sources.items():

        def step(source: torch.Tensor = source) -> None:
            other.copy_(source, non_blocking=True)
            shared.synchronize(setting.device)

        timed = shared.time_ms(step, setting)
        moved = size * (2 if name == "device" else 1)
        yield {"key": name, "gb_per_s": 1e-6 * moved / timed["p50_ms"], **timed}


def small_kernels(setting: Setting) -> Iterator[Row]:
    """What short texts hang on: the sum over one text's tokens, which a GPU adds one after the other, and a kernel of a graph that does nothing."""
    import torch

    device = shared.on(setting.device)
    for tokens in BAGS:
        hidden, bounds = torch.randn(tokens, 768, device=device), torch.tensor([0, tokens], device=device)
        places = torch.arange(tokens, device=device)

        def step(hidden: Any = hidden, bounds: Any = bounds, places: Any = places) -> None:
            torch.nn.functional.embedding_bag(places, hidden, bounds, mode="sum", include_last_offset=True)
            shared.synchronize(setting.device)

        yield {"key": f"bag of {tokens}", **shared.time_ms(step, setting)}
    if setting.device == "cuda":
        from bertopt.sessions.cuda_queue import CudaQueue

        number = torch.zeros(32, device=device)
        replay, _ = CudaQueue(device).capture(lambda: tuple(number.add_(1) for _ in range(NODES)))

        def replayed() -> None:
            replay()
            shared.synchronize(setting.device)

        yield {"key": f"graph of {NODES} kernels", **shared.time_ms(replayed, setting)}
        heads = torch.randn(512 * 64, 12, 64, dtype=torch.bfloat16, device=device)
        for room, longest in PLACES:
            begins = (torch.arange(room + 1, device=device, dtype=torch.int32) * 64).clamp(max=len(heads))

            def attend(begins: Any = begins, longest: int = longest) -> None:
                torch.ops.aten._flash_attention_forward(heads, heads, heads, begins, begins, longest, longest, 0.0, False, False)
                shared.synchronize(setting.device)

            yield {"key": f"attention, {room} places of {longest}", **shared.time_ms(attend, setting)}


def masked_rows(setting: Setting) -> Iterator[Row]:
    """Answers to a batch with a fully masked row must be finite in every precision and attention."""
    import numpy as np

    inputs = models.batch(4, 16)
    inputs["attention_mask"][2] = 0
    with tempfile.TemporaryDirectory() as scratch:
        for attention in ("eager", "sdpa"):
            for dtype in ("float32", "bfloat16", "float16"):
                key = f"{attention}-{dtype}"
                steps: list[tuple[str, dict[str, Any]]] = [("use_sdpa", {})] if attention == "sdpa" else []
                steps += [("cast_half", {"dtype": dtype})] if dtype != "float32" else []
                try:
                    model = models.apply(models.eager("tiny", Path(scratch, key)), steps, setting, Path(scratch, key))
                    answers = models.open_model(model, setting.device).run(inputs)["sentence_embedding"]
                except Missing as error:
                    yield {"key": key, "missing": str(error)}
                    continue
                yield {"key": key, "finite": bool(np.isfinite(answers).all()), "others_finite": bool(np.isfinite(answers[[0, 1, 3]]).all())}


def graphs(setting: Setting) -> Iterator[Row]:
    """Graphs that torch.compile makes over twelve lengths: more than two or three mean a guard on the length."""
    lengths = GRAPH_LENGTHS[:3] if setting.quick else GRAPH_LENGTHS
    steps: list[tuple[str, dict[str, Any]]] = [("use_sdpa", {}), ("cast_half", {}), ("compile_torch", {})]
    with tempfile.TemporaryDirectory() as scratch:
        model = models.apply(models.eager("tiny", Path(scratch)), steps, setting, Path(scratch))
        session = models.open_model(model, setting.device)
        for tokens in lengths:
            session.run(models.batch(4, tokens, ragged=True))
        yield {"key": "compile_torch", "lengths": list(lengths), "graphs": session.facts().graphs}


def tests(setting: Setting) -> Iterator[Row]:
    """`pytest -m gpu`, a row for each test as it ends; on a CPU the tests are collected only."""
    shared.need("pytest")
    root = Path(__file__).parents[2]
    files = sorted(str(path.relative_to(root)) for path in root.glob("tests/end_to_end/test_gpu*.py"))
    wanted = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-p", pytest_rows.__name__, *files]
    wanted += [f"--deselect={key}" for key in sorted(setting.done)]
    if setting.device == "cpu":
        wanted.append("--collect-only")
    else:
        # Most of a test's time is one thread that compiles.
        wanted += [word for plugin, words in _PLUGINS.items() if shared.found(plugin) for word in words]
    process = subprocess.Popen(wanted, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(pytest_rows.LINE):
            yield json.loads(line.removeprefix(pytest_rows.LINE))
        else:
            said.append(line)
    code, text = process.wait(), "".join(said)
    row: Row = {"key": "pytest", "exit_code": code}
    if counted := re.search(r"(\d+)(?:/\d+)? tests? collected", text):
        row["collected"] = int(counted[1])
    # 1: tests failed, which their rows say; 5: none was left.
    if code not in (0, 1, 5):
        row["failure"] = text[-600:]
    yield row


def aa(setting: Setting) -> Iterator[Row]:
    """One stage against itself in two workers, one of them always stopped: no verdict but NO DIFFERENCE or INCONCLUSIVE."""
    shared.need("optimum", "psutil", "scipy", "filelock", "yaml")
    import transformers

    from bertopt.pipeline.race import Budget, race
    from bertopt.workers.client import Workers

    wanted = 1 if setting.quick else RACES
    with tempfile.TemporaryDirectory() as scratch, Workers() as workers:
        source, stage = Path(scratch, "model"), Path(scratch, "stage")
        model = models.eager("tiny" if setting.quick else "minilm-l6", source)
        model.network.encoder.save_pretrained(source)
        transformers.AutoConfig.from_pretrained(source)
        stage.mkdir()
        with workers.start() as worker:
            fields = {"key": "0" * 64, "name": "reference", "device": setting.device}
            worker.call("load_checkpoint", source=str(source), task="feature-extraction", part=str(stage), fields=fields)
        racing: dict[Any, Any] = {}
        for number in (number for number in range(wanted) if str(number) not in setting.done):
            if not racing or not number % RACES_OF_A_PAIR:
                for worker in racing.values():
                    worker.close()
                racing = {role: workers.start() for role in ("stage", "reference")}
                for worker in racing.values():
                    worker.open(stage, setting.device)
            budget = Budget(0.0, 0.0, 6) if setting.quick else Budget(1.5, 0.0)
            with workers.calls_within(120.0):
                figures, _ = race(racing, _spec(stage), [(1, 16) if setting.quick else (8, 128)], (), budget)
            against = figures[0].vs_reference
            assert against is not None
            verdict = str(against.verdict)
            yield {"key": str(number), "verdict": verdict, "ratio": against.ratio, "low": against.low, "high": against.high,
                   "false_verdict": verdict in ("FASTER", "SLOWER"), "warning": figures[0].warning}  # fmt: skip
        for worker in racing.values():
            worker.close()


def _spec(stage: Path) -> Any:
    from bertopt import stages

    return stages.read_manifest(stage).spec


CASES: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "peaks": peaks, "copies": copies, "small_kernels": small_kernels, "masked_rows": masked_rows, "graphs": graphs, "package": package_stages.run, "pytest": tests, "aa": aa,
}  # fmt: skip
