"""The benchmarks of this machine alone: races of a model against itself, peaks, times of runs, servers, a busy machine."""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks import aa, peaks, pipeline, readme, roofline, serve, under_load
from benchmarks.peers.servers import PROGRAMS
from bertopt import recipe as recipes
from bertopt.checks import latency
from bertopt.errors import UsageError
from bertopt.results import Report
from bertopt.spec import Spec
from bertopt.system import environment


def test_a_slow_down_that_is_counted_is_one_that_is_measured() -> None:
    times = np.random.default_rng(0).uniform(9, 11, (2, 40))

    def timed(row: np.ndarray) -> latency.Contender:
        return latency.Contender("x", lambda _: latency.Turn([]), rounds=[latency.Turn([float(ms)]) for ms in row])

    as_measured = latency.compare(timed(times[0]), timed(times[1])).ratio()
    really = latency.compare(timed(times[0] * 1.25), timed(times[1])).ratio()
    counted = aa.slowed(as_measured, 0.25)
    assert (counted.ratio, counted.low, counted.high) == pytest.approx((really.ratio, really.low, really.high))
    assert counted.verdict == really.verdict == "SLOWER"


def test_races_of_a_model_against_itself_are_counted() -> None:
    rows = [{"kind": "aa", "verdict": verdict} for verdict in ("FASTER", "NO DIFFERENCE", "NO DIFFERENCE", "INCONCLUSIVE")]
    rows += [{"kind": "slow", "verdict": verdict} for verdict in ("SLOWER", "SLOWER", "SLOWER", "NO DIFFERENCE")]
    found = aa.counts(rows)
    assert (found["races"], found["false_verdicts"], found["no_difference"], found["slow_downs_detected"]) == (4, 1, 2, 3)
    assert "false verdicts: 1 (25.0%)" in aa.summary(rows, 0.05) and "5% slow-downs called SLOWER: 3 (75.0%)" in aa.summary(rows, 0.05)


def test_arithmetic_of_a_stage() -> None:
    spec = Spec(
        family="bert", task="feature-extraction", inputs=("input_ids",), outputs=("last_hidden_state",), layers=2, heads=2,
        hidden=4, vocabulary=9, token_types=1, pad_id=0, max_length=16, text_length=16, parameters=0,
    )  # fmt: skip
    weights = roofline.linear_weights(spec, {"intermediate_size": 8})
    assert weights == 2 * (4 * 4 * 4 + 2 * 4 * 8)
    # Scores and weighted values are two products of [S, S] with 4 channels in all, for each layer.
    assert roofline.operations(spec, weights, [3, 5]) == 2 * weights * 8 + 2 * (2 * 2 * 9 * 4 + 2 * 2 * 25 * 4)
    with pytest.raises(ValueError, match=r"expected one of bert, .*got 'albert'"):
        roofline.linear_weights(spec.model_copy(update={"family": "albert"}), {"intermediate_size": 8})


def test_shares_are_of_the_highest_peak_of_a_stage_s_precision() -> None:
    rows = [
        ("float32:torch", 2, 1e11),
        ("float32:openvino", 2, 2e11),
        ("int8:openvino", 2, 8e11),
        ("int8:onnxruntime", 1, 9e11),
        ("float32:registers", 2, 4e11),
    ]
    document = {
        "environment": {"cpu": "a CPU", "cores": 2, "isa": ["avx2"]}, "threads": [1, 2],
        "peaks": [{"kind": kind, "threads": n, "rate": rate, "shape": "2x3x4"} for kind, n, rate in rows],
        "stages": {
            "q": {"precision": "int8", "cases": [{"case": "8 × 128", "rate": 6e11}, {"case": "natural mix", "rate": 4e11}]},
            "f": {"precision": "float32", "cases": [{"case": "8 × 128", "rate": 1e11}]},
        },
    }  # fmt: skip
    lines = roofline.table(document).splitlines()
    assert "| float32 | 2 | 200 | openvino, 2×3×4 |" in lines
    assert "| float32 | 2 | 400 | registers alone |" in lines
    assert "| q | int8 | 75% | 50% |" in lines and "| f | float32 | 25% | — |" in lines


def test_products_of_registers_run_where_the_cpu_has_their_instructions() -> None:
    kinds = peaks.kinds(environment.describe()["isa"])
    for kind in peaks.REGISTERS:
        if kind in kinds:
            assert 1e9 < peaks.rates(kind, 1, 0.01)["registers"] < 1e14
    assert not set(peaks.kinds(["avx2"])) & set(peaks.REGISTERS)


def test_products_of_registers_read_and_write_no_memory(tmp_path: Path) -> None:
    if not (compiler := shutil.which("g++")) or platform.machine() != "x86_64":
        pytest.skip("no g++ for x86-64")
    source, out = Path(peaks.__file__).with_name("registers.cpp"), tmp_path / "registers.s"
    subprocess.run([compiler, "-O2", "-std=c++20", "-mavx512f", "-S", str(source), "-o", str(out)], check=True)
    vectors = [line for line in out.read_text("utf-8").splitlines() if "zmm" in line]
    assert any("vpdpbusd" in line for line in vectors) and not [line for line in vectors if "(" in line]


@pytest.mark.parametrize("kind", ["float32:torch", "float32:onnxruntime", "int8:onnxruntime", "int8:openvino"])
def test_peaks_time_the_product_they_name(kind: str) -> None:
    dtype, library = kind.split(":")
    pytest.importorskip(library)
    run, products = peaks.MAKERS[library](8, 16, 16, 1, dtype)
    run()
    assert products == (peaks.CHAIN if library == "openvino" else 1)


def test_stages_of_a_run_and_what_is_none(tmp_path: Path) -> None:
    for name in ("use_sdpa-12ab", "my-int8-34cd"):
        (tmp_path / "stages" / name).mkdir(parents=True)
        (tmp_path / "stages" / name / "manifest.json").write_text("{}")
    assert list(roofline.stage_paths(f"run={tmp_path}")) == ["run my-int8", "run use_sdpa"]
    for word in ("x", f"x={tmp_path / 'nowhere'}"):
        with pytest.raises(UsageError, match=r"expected NAME=DIR|is no stage"):
            roofline.stage_paths(word)


def test_a_process_is_measured_by_itself() -> None:
    seconds, peak, code = pipeline.timed(["-c", "b = b'x' * 50_000_000"])
    assert seconds > 0 and peak > 50e6 and code == 0
    with pytest.raises(pipeline.Failed, match=r"exited 3: Nope"):
        pipeline.timed(["-c", "import sys; print('Nope'); sys.exit(3)"])


def test_the_recipes_it_times_are_valid(tmp_path: Path) -> None:
    model = pipeline.checkpoint(tmp_path / "model", 3)
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 3
    for steps in (1, len(pipeline.STEPS)):
        assert len(recipes.load(pipeline.recipe(tmp_path / "r.yaml", model, steps)).steps) == steps


def test_the_time_of_a_run_is_given_by_stage_and_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 3.0, 7.0, 7.5, 8.0])
    monkeypatch.setattr("benchmarks.pipeline.time.perf_counter", lambda: next(now))
    spent = iter([10.0, 13.0, 14.0, 20.0, 20.0, 20.0])
    monkeypatch.setattr(pipeline, "cpu_seconds", lambda: next(spent))
    clock = pipeline.PhaseClock()
    for doing in ("reference: loading pkg://name", "bf16: latency", "bf16: 300 labelled texts", None, "bf16: latency"):
        clock(Report(bertopt_version="", recipe={}, environment={}, model={}), doing)
    assert dict(clock.seconds) == {
        ("run", "starting"): 2.0, ("reference", "loading"): 1.0, ("bf16", "latency"): 4.0, ("bf16", "quality"): 0.5,
        ("run", "recording"): 0.5,
    }  # fmt: skip
    assert clock.cpu_seconds["run", "starting"] == 3.0 and clock.cpu_seconds["bf16", "latency"] == 6.0
    rows = [
        {"stage": stage, "phase": phase, "seconds": s, "cpu_s": clock.cpu_seconds[stage, phase]}
        for (stage, phase), s in clock.seconds.items()
    ]
    table = pipeline.phase_table({"phases": rows, "wall_s": 8.0})
    assert "| bf16 |  |  | 4.0 | 0.5 |  | 4.5 |" in table
    assert "| CPU seconds | 3.0 | 1.0 | 6.0 | 0.0 | 0.0 | 10.0 |" in table


def test_cpu_seconds_count_started_processes() -> None:
    before = pipeline.cpu_seconds()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        assert pipeline.cpu_seconds() - before >= 0.25
        process.communicate(b"\n")


def served(late_ms: float) -> dict[str, Any]:
    rates = [{"rate": 10.0, "texts_s": 80.0, "p99_ms": 12.0, "errors": 0}, {"rate": 20.0, "texts_s": 150.0, "p99_ms": late_ms, "errors": 0}]
    return {"one_client_p50_ms": 1.5, "saturated_texts_s": 200.0, "held_texts_s": 80.0, "memory_mb": 150.0, "errors": 0, "rates": rates}


def test_servers_are_shown_with_the_rates_they_held() -> None:
    found = {
        "environment": {"cpu": "a CPU", "cores": 2, "isa": ["avx2"]}, "limit_ms": 50.0, "cores": [0],
        "offline": {"texts_s": 250.0, "one_text_p50_ms": 0.9}, "servers": {"bertopt": served(70.0), "another <one>": served(500.0) | {"held_texts_s": None, "errors": 7}},
    }  # fmt: skip
    table = serve.table(found)
    assert "| bertopt | 1.5 ms | 200 | 80 | 150 MB |" in table and "| another <one> | 1.5 ms | 200 (7 requests failed) | none | 150 MB |" in table
    assert "64 clients reach 0.80 of the 250 texts/s that bertopt.load reaches offline; a text alone takes it 0.9 ms." in table
    picture = serve.picture(found)
    assert picture.count('class="best"') == picture.count('class="base"') == 2 and "another &lt;one&gt;" in picture
    page = readme.serving({"serve": found, "serve_own_core": found})
    assert page.count("| bertopt |") == 2 and "(benchmarks/results/serve.svg)" in page and "(benchmarks/results/serve_own_core.json)" in page


def test_the_servers_of_others_are_python() -> None:
    for name, program in PROGRAMS.items():
        compile(program, name, "exec")
    count, body = serve.Contender([], "/embeddings", "input").request(random.Random(1), ["a", "b"], 16)
    assert len(json.loads(body)["input"]) == count


def test_a_busy_machine_is_shown_by_the_ratio_of_each_round() -> None:
    rounds = [{"alone": [1.0, 2.0, 3.0], "busy": [4.0]}, {"alone": [1.0], "busy": [3.0, 3.0]}]
    found = under_load.summary(rounds)
    assert (found["ratio"], found["ratio_range"], found["alone"]["calls"], found["busy"]["p50_ms"]) == (2.5, [2.0, 3.0], 4, 3.0)
    where = {"cpu": "c", "isa": ["avx2"]}
    table = under_load.table({"environment": where, "rounds": 2, "contenders": {"bertopt native int8": {"short query": found}}})
    assert "| bertopt native int8 | short query | 1.50, 2.70 | 3.00, 3.80 | 2.5 (2.0 to 3.0) |" in table


def test_processes_that_keep_cores_busy_end_with_the_block() -> None:
    with under_load.busy([0]):
        loops = [child for child in psutil.Process().children() if "sched_setaffinity" in " ".join(child.cmdline())]
        assert len(loops) == 1 and loops[0].cpu_affinity() == [0]
    assert not loops[0].is_running()
