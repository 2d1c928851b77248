"""The peer benchmark's own parts, without any peer: protocol, sleeping contenders, ratios, tables, bad usage."""

from __future__ import annotations

import json
import platform
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import psutil
import pytest

from benchmarks import aa, cpu_peers, peaks, pipeline, readme, roofline, serve, under_load
from benchmarks.peers import build, figures, loaders, models, race, roster, tables
from benchmarks.peers.contender import Contender, ContenderError, decoded
from benchmarks.peers.models import Scenario
from benchmarks.peers.servers import PROGRAMS
from bertopt import recipe as recipes
from bertopt.checks import latency
from bertopt.errors import UsageError
from bertopt.results import Report
from bertopt.spec import Spec
from bertopt.system import environment
from tests.support.tiny_models import write_tiny

FAKE = """
import time

def lengths(options):
    def answer(texts):
        if "fail" in texts:
            raise ValueError("asked to fail")
        if "hang" in texts:
            time.sleep(60)
        print("what a library prints")
        if "d" in texts and options.get("fragile"):
            raise ValueError("lost on the way")
        time.sleep(options.get("pause_s", 0) * len(texts))
        return [[float(len(text)), 1.0] for text in texts]
    return answer, {"directory": options["directory"]}

def labels(options):
    return lambda texts: [text[0] for text in texts], {}

def broken(options):
    raise RuntimeError("no such model")
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Path:
    (tmp_path / "fakes.py").write_text(FAKE)
    return tmp_path


def ready(name: str, folder: Path, load: str = "lengths", peer: bool = True, **options: Any) -> roster.Ready:
    entry = roster.Entry(name, None, f"fakes:{load}", peer=peer)
    found = {"load": entry.load, "directory": "d", "threads": 1, **options}
    return roster.Ready(entry, Path(sys.executable), (folder,), found, json.dumps(options))


@pytest.fixture
def contender(fakes: Path) -> Iterator[Contender]:
    one = ready("fake", fakes)
    with Contender("fake", one.python, one.options, fakes / "log", 20, one.path) as found:
        yield found


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_contender_answers_in_order_and_sleeps_between(contender: Contender) -> None:
    assert contender.facts["directory"] == "d" and "numpy" in contender.facts["versions"]
    contender.ask("texts", name="natural", texts=["a", "bbb", "cc"])
    assert decoded(contender.ask("answers", name="natural")).tolist() == [[1, 1], [3, 1], [2, 1]]
    assert contender.facts["load_s"] >= 0
    timed = contender.ask("run", name="natural", start=0, stop=3, window=2)
    assert len(timed["seconds"]) == 2 and timed["cpu_s"] >= 0
    assert len(contender.ask("run", name="natural", start=1, stop=3, window=0)["seconds"]) == 1
    deadline = time.monotonic() + 5
    while state(contender.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    assert state(contender.pid) == "T"


def test_a_contender_s_memory_is_not_its_parents(fakes: Path) -> None:
    ballast = np.ones(60_000_000)
    one = ready("small", fakes)
    with Contender("small", one.python, one.options, fakes / "log", 20, one.path) as contender:
        assert 0 < contender.ask("facts")["peak_rss_mib"] < ballast.nbytes / 2**20


def test_what_a_contender_cannot_do_is_said(fakes: Path, contender: Contender) -> None:
    contender.ask("texts", name="natural", texts=["fail"])
    with pytest.raises(ContenderError, match="fake: ValueError: asked to fail"):
        contender.ask("answers", name="natural")
    with pytest.raises(ContenderError, match="has ended"):
        contender.ask("facts")
    one = ready("none", fakes, "broken")
    with pytest.raises(ContenderError, match="none: RuntimeError: no such model"):
        Contender("none", one.python, one.options, fakes / "log2", 20, one.path)


def test_a_contender_that_hangs_is_ended(fakes: Path) -> None:
    one = ready("slow", fakes)
    with Contender("slow", one.python, one.options, fakes / "log", 20, one.path) as contender:
        contender.ask("texts", name="natural", texts=["hang"])
        contender.timeout_s = 0.2
        with pytest.raises(ContenderError, match=r"'run' took longer than 0.2 s"):
            contender.ask("run", name="natural", start=0, stop=1, window=1)


def job(rounds: int = 3) -> race.Job:
    scenarios = [Scenario("offline", "natural", 8, 0), Scenario("short query", "short", 4, 1)]
    texts = {"natural": [f"text {'x' * n}" for n in range(8)], "short": ["a", "b", "c", "d"]}
    return race.Job(scenarios, texts, [""] * 8, rounds, 60, 20)


def raced(folder: Path, contenders: list[roster.Ready], into: dict[str, Any], rounds: int = 3) -> list[str]:
    said: list[str] = []
    wanted = job(rounds)
    vectors = np.array([[len(text), 1.0] for text in wanted.texts["natural"]], np.float32)
    race.race(into, contenders, vectors, wanted, folder, lambda: None, said.append)
    return said


def test_a_race_is_interleaved_complete_and_goes_on(fakes: Path) -> None:
    race_: dict[str, Any] = {"contenders": {}, "turns": []}
    three = [
        ready("a", fakes, peer=True),
        ready("slow", fakes, pause_s=0.03, peer=False),
        ready("lost", fakes, "broken"),
    ]
    raced(fakes, three, race_, 2)
    turns = race_["turns"]
    for number in range(2):
        of = [turn["scenario"] for turn in turns if turn["round"] == number]
        # Scenarios come one after another, with everyone in each.
        assert sorted(of) == ["offline"] * 2 + ["short query"] * 2 and of[0] == of[1]
    assert race_["contenders"]["a"]["fidelity"]["cosine_mean"] == pytest.approx(1)
    assert "no such model" in race_["contenders"]["lost"]["failed"]
    before = list(turns)
    raced(fakes, three, race_, 4)
    assert race_["turns"][: len(before)] == before
    assert set(figures.costs(race_["turns"], "offline", "a")) == {0, 1, 2, 3}
    # Sleeping 30 ms a text it is beaten after three rounds, and sits out the fourth.
    assert set(figures.costs(race_["turns"], "offline", "slow")) == {0, 1, 2}
    raced(fakes, [ready("a", fakes, pause_s=0.0)], race_, 1)
    assert len(figures.costs(race_["turns"], "offline", "a")) == 1, "another model's turns were kept"


def test_who_fails_on_the_way_is_out_and_the_race_goes_on(fakes: Path) -> None:
    race_: dict[str, Any] = {"contenders": {}, "turns": []}
    one = ready("fragile", fakes, fragile=True)
    wanted = job(2)
    wanted.texts["short"][:] = ["a", "b", "c", "d"]
    wanted.scenarios[1:] = [Scenario("short query", "short", 2, 1)]  # type: ignore[index]
    vectors = np.array([[len(text), 1.0] for text in wanted.texts["natural"]], np.float32)
    race.race(race_, [one, ready("b", fakes)], vectors, wanted, fakes, lambda: None, lambda _: None)
    assert race_["contenders"]["fragile"]["failed"] == "fragile: ValueError: lost on the way"
    assert set(figures.costs(race_["turns"], "short query", "fragile")) == {0}
    assert set(figures.costs(race_["turns"], "short query", "b")) == {0, 1}


def test_a_race_on_one_thread_keeps_fidelity_and_counts_cpu_time(fakes: Path) -> None:
    race_: dict[str, Any] = {"contenders": {}, "turns": []}
    one = ready("a", fakes, pause_s=0.01, cores=[0, 1], streams=2)
    raced(fakes, [one], race_, 1)
    before = json.loads(json.dumps(race_["contenders"]["a"]))
    alone = job(1)
    alone.scenarios[:] = [Scenario(figures.BY_CPU, "natural", 8, 0, one_thread=True)]  # type: ignore[index]
    again = one.on_one_thread()
    assert (again.options["threads"], again.options["streams"], again.options["cores"]) == (1, 0, [0])
    race.race(race_, [again], None, alone, fakes, lambda: None, lambda _: None)
    assert race_["contenders"]["a"] == before
    # It sleeps 10 ms a text, which is no CPU time.
    last = race_["turns"][-1]
    assert last["scenario"] == figures.BY_CPU and figures.cost(last) == pytest.approx(1e3 * last["cpu_s"] / 8) and last["cpu_s"] < last["seconds"]


def test_large_models_race_with_few_peers_in_few_scenarios() -> None:
    large, minilm = models.CHECKPOINTS["large24"], models.CHECKPOINTS["minilm"]
    assert {entry.name for entry in roster.wanted(large, [], [])} == roster.FASTEST | set(roster.NATIVE)
    names = {entry.name for entry in roster.wanted(minilm, [], [])}
    assert names > roster.FASTEST | {"inductor int8", "llama.cpp q8_0"} and "optimum ONNX" not in names
    assert "optimum ONNX" in {entry.name for entry in roster.wanted(minilm, [], [], everyone=True)}
    assert [s.name for s in large.scenarios(False, 512)] == ["offline", "windows of 16", figures.BY_CALL, "8 x 128", figures.BY_CPU]
    assert {entry.name for entry in roster.PEERS} >= roster.FASTEST | roster.OTHERS


def test_every_round_takes_the_next_texts() -> None:
    scenario = Scenario("windows of 16", "natural", 128, 16)
    assert [scenario.slice(n, 512) for n in (0, 1, 4)] == [(0, 128), (128, 256), (0, 128)]
    assert Scenario("offline", "natural", 512, 0).slice(3, 64) == (0, 64)


def turn(round_: int, contender: str, ms: float, scenario: str = "offline") -> dict[str, Any]:
    return {
        "round": round_, "scenario": scenario, "contender": contender, "texts": 10, "seconds": ms / 100,
        "p50_ms": ms, "p90_ms": ms,
    }  # fmt: skip


def result() -> dict[str, Any]:
    """Ours is twice as fast as the best peer in every round, although the machine slows down fourfold."""
    turns = []
    for number in range(6):
        drift = 1 + number * 0.6
        for scenario in ("offline", "short query"):
            for name, ms in (("p1", 40.0), ("p2", 20.0), ("exact", 30.0), ("ours", 10.0 * (1 + 0.01 * (-1) ** number))):
                turns.append(turn(number, name, ms * drift, scenario))
    contenders: dict[str, Any] = {
        name: {"peer": name != "ours", "fidelity": {"cosine_mean": mean, "cosine_min": 0.9}}
        for name, mean in (("p1", 0.99), ("p2", 0.995), ("exact", 1.0), ("ours", 0.99995))
    }
    contenders["gone"] = {"peer": True, "failed": cpu_peers.MISSING}
    scenarios = [{"name": "offline"}, {"name": "short query"}]
    race_ = {
        "title": "a model", "labelled": False, "scenarios": scenarios, "contenders": contenders, "turns": turns
    }  # fmt: skip
    environment = {"cpu": "a CPU", "cores": 2, "isa": ["avx2"]}
    return {"environment": environment, "settings": {"threads": 2}, "models": {"minilm": race_}}


def test_ratios_are_paired_by_round() -> None:
    race_ = result()["models"]["minilm"]
    assert figures.best_peer(race_, "offline") == "p2" and figures.best_peer(race_, "offline", near=True) == "exact"
    row = next(row for row in figures.figures(race_, "offline") if row["contender"] == "ours")
    assert row["vs_best"]["ratio"] == pytest.approx(2, rel=0.01) and row["vs_best"]["rounds"] == 6
    assert 1.9 < row["vs_best"]["low"] < 2 < row["vs_best"]["high"] < 2.1
    assert row["vs_near_lossless"]["ratio"] == pytest.approx(3, rel=0.01)
    assert figures.ratio({0: 1.0}, {0: 2.0, 1: 2.0}) is None
    assert figures.ratio({0: 1.0, 1: 1.0, 5: 9.0}, {0: 2.0, 1: 2.0})["rounds"] == 2  # type: ignore[index]
    assert figures.beaten(race_["turns"], "offline", ["p1", "p2", "ours"], 3, 1.7) == {"p1", "p2"}
    assert not figures.beaten(race_["turns"], "offline", ["p1", "ours"], 7, 1.7)


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


def test_fidelity_is_of_comparable_finite_answers() -> None:
    reference = np.eye(3, dtype=np.float32)
    assert figures.fidelity(reference * 2, reference, [])["cosine_min"] == pytest.approx(1)
    bad = reference.copy()
    bad[1] = np.nan
    with pytest.raises(ValueError, match="1 of 3 vectors"):
        figures.fidelity(bad, reference, [])
    with pytest.raises(ValueError, match=r"expected vectors of shape \[3, 3\]; got \[3, 2\]"):
        figures.fidelity(bad[:, :2], reference, [])
    assert figures.fidelity(["a", "b"], ["a", "a"], ["b", "b"]) == {"accuracy": 0.5, "agreement": 0.5}
    with pytest.raises(ValueError, match="expected 2 labels; got 1"):
        figures.fidelity(["a"], ["a", "a"], ["b", "b"])


def test_the_table_and_the_picture() -> None:
    document = result()
    table = tables.markdown(document)
    lines = table.splitlines()
    assert lines[2] == "| | offline, texts/s | short query, ms | fidelity | memory, MiB | load, s |"
    # The median round runs at 2.5 times the first one's time: 20 ms a text become 50.
    assert "| p2 | 20 best peer | 50.00 best peer | 0.99500, 0.9000 | — | — |" in lines
    assert (
        any(line.startswith("| **ours** | 40 (×2.00 [") for line in lines)
        and "| gone | — | — | not on this CPU | — | — |" in lines
    )
    assert "Against the best near-lossless peer (mean cosine ≥ 0.9999): ours: offline ×3.00 [" in table
    picture = ElementTree.fromstring(tables.picture(document["models"]["minilm"]))
    assert len([part for part in picture.iter() if part.get("class") == "best"]) == 2


def test_texts_are_cut_to_exact_lengths(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    source = write_tiny(tmp_path / "tiny", pooling="mean")
    texts = ["the cat sat on the mat", "a very good film, it was not bad!"]
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.no_padding()
    for length in (5, 40):
        found = models.cut(source, texts, length, 3)
        assert [len(tokenizer.encode(text).ids) for text in found] == [length] * 3
    assert models.max_length(source) == 48


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--shared", "nowhere"], "is missing; give the folder"),
        (["--ours", "x"], "--ours must be [MODEL:]NAME=DIR; got 'x'"),
        (["--ours", "tiny:x=y"], "got 'tiny'"),
        (["--ours", "x=nowhere"], "'nowhere' is no artefact"),
        (["--only", "torch"], "--only must name contenders"),
    ],
)
def test_wrong_usage_exits_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    for name in ("train", "validation"):
        path = shared / cpu_peers.DATA / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a", "label": "b"}\n')
    monkeypatch.chdir(tmp_path)
    folders = ["--peers", "peers", "--out", "out.json"]
    assert cpu_peers.main([*folders, "--shared", str(shared), *words]) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out.json").exists()


def test_a_result_of_other_settings_is_not_added_to(tmp_path: Path) -> None:
    options = cpu_peers.parsed(["--out", str(tmp_path / "r.json"), "--threads", "1"])
    found = cpu_peers.document(options)
    options.out.write_text(json.dumps(found))
    assert cpu_peers.document(options) == found
    options.threads = 2
    with pytest.raises(ValueError, match="give --fresh"):
        cpu_peers.document(options)


def test_every_peer_s_environment_is_pinned() -> None:
    folder = Path(models.__file__).parent
    for name in {entry.environment for entry in roster.PEERS if entry.environment}:
        pins = [line for line in (folder / f"{name}.txt").read_text().splitlines() if not line.startswith("#")]
        assert pins[0] == "torch==2.13.0" and all("==" in line for line in pins)


def test_every_peer_s_model_can_be_made_and_opened() -> None:
    for entry in roster.PEERS:
        assert entry.made is None or entry.made in build.MAKERS
        assert hasattr(loaders, entry.load.removeprefix("loaders:"))


def test_llama_truncates_as_the_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    class Llama:
        n_batch = 512

        def __init__(self, path: str, **options: Any) -> None:
            assert (path, options["n_threads"], options["n_threads_batch"]) == ("d/model.gguf", 2, 2)

        def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
            return [101, *text, 102]

        def embed(self, texts: list[str], normalize: bool) -> list[list[int]]:
            assert normalize
            return [(self.tokenize(text.encode()) + [0] * 4)[:4] for text in texts]  # type: ignore[call-arg]

    library = SimpleNamespace(Llama=Llama, LLAMA_POOLING_TYPE_MEAN=1, llama_print_system_info=lambda: b"AVX512")
    monkeypatch.setitem(sys.modules, "llama_cpp", library)
    model, facts = loaders.llama({"directory": "d", "threads": 2, "max_length": 4})
    assert model(["\x01", "\x01\x02", "\x01\x02\x03"]).tolist() == [[101, 1, 102, 0], [101, 1, 2, 102], [101, 1, 2, 102]]
    assert facts == {"n_batch": 512, "system": "AVX512"}


def test_readme_shows_the_results_beside_their_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "cpu_peers.json"
    file.write_text(json.dumps(result()))
    monkeypatch.setattr(readme, "CPU_PEERS", [file, file.with_name("cpu_peers_zen4.json")])
    file.with_name("cpu_peers_zen4.json").write_text(json.dumps(result()))
    text = readme.updated("a\n<!-- cpu_peers: begin -->\nold\n<!-- cpu_peers: end -->\nb\n")
    assert text.startswith("a\n<!-- cpu_peers: begin -->\n**a model**") and "old" not in text
    assert "[raw figures](benchmarks/results/cpu_peers.json)" in text and "![a model](benchmarks/results/cpu_peers_minilm.svg)\n" in text
    assert "[raw figures](benchmarks/results/cpu_peers_zen4.json)" in text
    assert "![a model](benchmarks/results/cpu_peers_zen4_minilm.svg)\n<!-- cpu_peers: end -->\nb\n" in text
    assert readme.updated(text) == text


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
