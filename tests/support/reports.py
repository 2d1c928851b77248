"""Reports with every field and hostile text, for tests of what shows them."""

from __future__ import annotations

import math

from bertopt.results import (
    Blame,
    Case,
    Comparison,
    Delivered,
    Invariance,
    Latency,
    Limits,
    Parity,
    Quality,
    Ranking,
    Ratio,
    Report,
    Stage,
    Worst,
)  # fmt: skip
from bertopt.results.fidelity import Certificate, Rounding

EVIL = (
    "<script>alert('1')</script> & \"quotes\" </style><img src=x onerror=alert(2)>\u2028\x1b[31mred\x1b[0m {{ 7 * 7 }}"
)
LONG = "a_name_as_long_as_names_may_be_" + "x" * 33


def ratio(by: float, spread: float = 0.03) -> Ratio:
    return Ratio(ratio=by, low=by * (1 - spread), high=by * (1 + spread))


def latency(ms: float, whole: float | None, step: float | None, spread: float = 0.03) -> list[Latency]:
    def against(by: float | None) -> Ratio | None:
        return None if by is None else ratio(by, spread)

    shape = Latency(kind="shape", batch=8, sequence=128, n=420, p50_ms=ms, p90_ms=ms * 1.1, p99_ms=ms * 1.3,
                    texts_per_s=8000 / ms, vs_reference=against(whole), vs_parent=against(step))  # fmt: skip
    mix = Latency(kind="mix", batch=None, sequence=None, n=12, p50_ms=ms * 3, p90_ms=ms * 4, p99_ms=None,
                  texts_per_s=4000 / ms, vs_reference=against(whole), vs_parent=against(step),
                  warning=f"the spread is wide {EVIL}" if spread > 0.1 else None)  # fmt: skip
    return [shape, mix]


def parity(max_abs: float, cosine: float, limits: Limits, blame: str | None = None) -> Parity:
    where = "logits[3, 1], 8 × 128, left"
    cases = [
        Case(batch=batch, sequence=128, padding=padding, max_abs=max_abs if padding == "left" else max_abs / 3,
             rel_l2=max_abs * 2, cosine_min=cosine, cosine_mean=1 - (1 - cosine) / 2, label_flips=int(padding == "left"),
             compared=batch, where=where if (batch, padding) == (8, "left") else f"logits[0, 0], {batch} × 128, {padding}",
             finite=not math.isnan(max_abs))
        for batch in (1, 8) for padding in ("none", "right", "left", "holes")
    ]  # fmt: skip
    passed = limits.rel_l2 is None or max_abs * 2 <= limits.rel_l2
    tokens = ["[CLS]", *(f"word{i}" for i in range(98)), "<b>bad</b>", EVIL, "##s", "[SEP]"]
    return Parity(
        passed=passed, cases=cases, limits=limits,
        worst=Worst(metric="rel_l2", value=max_abs * 2, limit=limits.rel_l2 or 1.0, where=where,
                    text=f"The text of the worst row. {EVIL}", tokens=tokens, token=100),
        vs_parent=Comparison(max_abs=max_abs / 2, rel_l2=max_abs, cosine_min=cosine, cosine_mean=1.0, label_flips=1, compared=36),
        blame=Blame(stage=blame, rel_l2=max_abs * 1.9, total=max_abs * 2) if blame else None,
    )  # fmt: skip


def stage(index: int, name: str, after: str | None, status: str, **fields: object) -> Stage:
    given = {
        "index": index,
        "name": name,
        "pass": None if after is None else "use_sdpa",
        "after": after,
        "status": status,
    }
    return Stage.model_validate(given | {"form": "onnx", "precision": "float32"} | fields)


def full(failed: bool = False) -> Report:
    """A run that shows everything a report can hold; with `failed` it delivers nothing."""
    exact = Limits(max_abs=1e-4, rel_l2=1e-5, cosine_min=0.999999, label_flips_max=0.0, invariance_max=1e-4)
    loose = Limits(error_ratio_max=1.3, rel_l2=0.3, cosine_min=0.98, cosine_mean=0.99, label_flips_max=0.2, metric_drop_max=0.01,
                   invariance_max=0.1, spearman_min=0.98, top_k_overlap_min=0.9)  # fmt: skip
    unsure = latency(37, 1.13, 1.02, 0.2)
    # As one was measured on a busy machine.
    unsure[1].vs_parent = Ratio(ratio=1.34, low=0.09, high=8.34)
    stages = [
        stage(0, "reference", None, "ok", form="eager", size_bytes=438_000_000, build_s=1.2, peak_rss_bytes=912_000_000,
              latency=latency(42, None, None), quality=Quality(metric="accuracy", value=0.87, reference=0.87, change=0, n=500),
              peak_gpu_bytes=0, facts={"runtime": "torch 2.11.0", "threads": 2}),
        stage(1, "use_sdpa", "reference", "ok", size_bytes=438_000_000, parity=parity(2e-6, 0.9999999999, exact),
              latency=latency(38, 1.11, 1.11), changes={"attention_calls": 6}, effects={"attention": (6, 6)},
              peak_rss_bytes=800_000_000, reused=True),
        stage(2, LONG, "use_sdpa", "ok", precision="int8", size_bytes=110_000_000, peak_rss_bytes=500_000_000,
              peak_gpu_bytes=210_000_000, parity=parity(0.2, 0.97, loose, blame="use_sdpa"), latency=latency(18, 2.4, 2.1),
              waived=[f"rel_l2 must be at most 0.3; got 0.4, waived until 2027-01-31: known, see ticket 12 {EVIL}"],
              invariance=Invariance(max_abs=0.02, cosine_min=0.999, texts=24, where=f"text 3 {EVIL}"),
              rounding=Rounding(error=0.13, error_ratio=1.02, slope_error=0.07, bias=0.9, flip_margin=None, rank_ratio=1.0,
                                parent_ratio=None, vectors=182),
              certificate=Certificate(status="certified", reason=f"every weight rounded or equal {EVIL}", weights=116),
              ranking=Ranking(spearman=0.991, top_k_overlap=0.94, k=5, n=150),
              quality=Quality(metric="accuracy", value=0.868, reference=0.87, change=-0.002, n=500, low=0.84, high=0.894,
                              change_low=-0.01, change_high=0.006), facts={"provider": EVIL, EVIL: 1},
              changes={"matmul": 36, "kept": 0}, effects={"int8 weights": (36, 36), "QAttention": (6, 6)}),
        stage(3, "slower", LONG, "ok", size_bytes=110_000_000, parity=parity(0.0, 1.0, exact), latency=latency(30, 1.4, 0.58)),
        stage(4, "unsure", "use_sdpa", "ok", parity=parity(0.1, 0.99, loose), latency=unsure),
        stage(5, "fuse_ort", "use_sdpa", "noop", reason="it changed nothing", changes={"fused_nodes": 0},
              effects={"fused attention": (6, 0)}),
        stage(6, "build_tensorrt", "use_sdpa", "unsupported", reason=f"no NVIDIA GPU: {EVIL}"),
        stage(7, "cast_half", "use_sdpa", "failed", precision="float16", parity=parity(math.nan, math.nan, loose, blame="cast_half"),
              reason=f"cosine_min must be at least 0.98; got nan\n{EVIL}",
              facts={"log": f"a line of its log\n{'wide ' * 90}\n{EVIL}"}, latency=latency(20, 2.1, 1.9)),
        stage(8, "skipped_bf16", "reference", "skipped", precision="bfloat16", parity=parity(0.3, 0.97, loose),
              latency=latency(25, 1.7, 1.7), reason="on_fail: skip ended the branch here: rel_l2 must be at most 0.3; got 0.6"),
        stage(9, "after_it", "cast_half", "skipped", reason="'cast_half', which it starts from, is failed"),
    ]  # fmt: skip
    return Report(
        bertopt_version="0.1.0",
        recipe={
            "schema_version": 1,
            "model": "org/model",
            "device": "auto",
            "steps": [{"pass": "use_sdpa"}],
            "note": EVIL,
        },
        environment={"cpu": f"AMD EPYC {EVIL}", "isa": [], "packages": {"torch": "2.11.0"}, "cuda": {"cuda": False}},
        model={"source": f"org/model {EVIL}", "sha256": "ab" * 32, "warnings": [f"an odd tokenizer {EVIL}"]},
        stages=stages,
        delivered=None if failed else Delivered(stage=LONG, path="artifact"),
        wall_s=143.2,
        exit_code=3 if failed else 0,
        reason=f"'cast_half' failed: cosine_min must be at least 0.98; got nan {EVIL}" if failed else None,
    )
