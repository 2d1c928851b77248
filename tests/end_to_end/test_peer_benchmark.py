"""The peer benchmark's own parts, without any peer: protocol, sleeping contenders, ratios, tables, bad usage."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import cpu_peers, readme
from benchmarks.peers import build, figures, loaders, models, race, roster, tables
from benchmarks.peers.contender import Contender, ContenderError, decoded
from benchmarks.peers.models import Scenario
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
