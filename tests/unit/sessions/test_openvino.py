"""The OpenVINO session, on a model converted by OpenVINO itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bertopt import stages
from bertopt.checks import parity
from bertopt.core import Context, Eager, OpenVino, Spec
from bertopt.errors import Unsupported
from bertopt.modeling import checkpoint
from bertopt.passes import UseSdpa
from bertopt.sessions import open_session, openvino
from bertopt.sessions.openvino import OpenVinoSession
from bertopt.sessions.openvino_request import Short
from bertopt.system import environment, openvino_import
from tests.support.artefacts import write_artefact
from tests.support.compared import cases
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module")
def models(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory, export: Exports) -> tuple[Eager, OpenVino]:
    pytest.importorskip("openvino")
    openvino = openvino_import.openvino()
    reference = checkpoint.load(tiny())
    folder = tmp_path_factory.mktemp("openvino")
    graph = export(UseSdpa()(reference, Context(folder)).model, Context(folder), opset=20)
    path = folder / "elsewhere" / "model.xml"
    openvino.save_model(openvino.convert_model(graph.path), path, compress_to_fp16=False)
    return reference, OpenVino(reference.spec, "float32", path)


def test_it_agrees_in_float32_where_the_cpu_has_bf16(models: tuple[Eager, OpenVino]) -> None:
    reference, model = models
    ours, theirs, spec = open_session(model), open_session(reference), reference.spec
    verdict = parity.judge(cases(ours, theirs, spec, [(2, 8)]), parity.DEFAULT_LIMITS["float32"], None)
    assert verdict.passed, verdict.worst
    assert ours.facts().precision == "f32"


@pytest.mark.parametrize(("variable", "advice"), [("ONEDNN_MAX_CPU_ISA", "unset ONEDNN_MAX_CPU_ISA"), (None, "export another precision")])
def test_a_kernel_that_is_missing_here(
    variable: str | None, advice: str, models: tuple[Eager, OpenVino], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenVINO words it where ONEDNN_MAX_CPU_ISA=AVX2 forbids the instructions of bfloat16."""
    said = "Check '!getSupportedPrimitiveDescriptors().empty()' failed\nSupported primitive descriptors list is empty for node: Softmax_4808 type: Softmax\n"

    def compiled(*_: object) -> None:
        raise RuntimeError(said)

    monkeypatch.setattr(openvino_import.openvino().Core, "compile_model", compiled)
    if variable is not None:
        monkeypatch.setenv(variable, "AVX2")
    with pytest.raises(Unsupported, match=rf"no kernel here for Softmax in float32: {advice}"):
        open_session(models[1])
    said = "something else"
    with pytest.raises(RuntimeError, match="something else"):
        open_session(models[1])


def test_a_kernel_that_is_missing_when_it_runs(models: tuple[Eager, OpenVino], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where ONEDNN_MAX_CPU_ISA=SSE41 leaves a normalisation without one: a traceback at the first text, as for a bug."""
    # Not the real one, which oneDNN reads once for the process.
    monkeypatch.setattr(openvino, "_LESS_ISA", ("A_VARIABLE",))
    monkeypatch.setenv("A_VARIABLE", "SSE41")

    def run(*_: object) -> None:
        raise RuntimeError("Exception from node.cpp:823:\n[CPU] MVN node with name 'MVN_39' bad combination\n\n")

    monkeypatch.setattr(openvino.Request, "run", run)
    with pytest.raises(Unsupported, match=r"no kernel here for MVN in float32: unset A_VARIABLE"):
        open_session(models[1])


def test_the_library_that_frees_with_libc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that keeps TBB from it is set only while a model is compiled, and only where another allocator may be."""
    switch = "TBB_ENABLE_SANITIZERS"
    monkeypatch.delenv(switch, raising=False)
    for preloaded, expected in (("", None), ("/usr/lib/libjemalloc.so.2", "1")):
        monkeypatch.setenv("LD_PRELOAD", preloaded)
        with openvino_import.one_allocator():
            assert os.environ.get(switch) == expected
        assert switch not in os.environ
    monkeypatch.setenv(switch, "0")
    with openvino_import.one_allocator():
        assert os.environ[switch] == "0"


_ALLOCATORS = [path for name in ("libjemalloc.so.2", "libtcmalloc_minimal.so.4") for path in Path("/usr/lib").glob(f"*/{name}")]


@pytest.mark.skipif(not _ALLOCATORS, reason="needs jemalloc or tcmalloc (apt-get install libjemalloc2)")
@pytest.mark.parametrize("allocator", _ALLOCATORS, ids=lambda path: path.name)
def test_it_runs_with_another_allocator(allocator: Path, tiny: Tiny, tmp_path: Path) -> None:
    """It aborted: a library that TBB loads freed with libc what the other had allocated."""
    artefact = write_artefact(tiny(), tmp_path / "artefact", "openvino")
    code = "import os, sys, bertopt; bertopt.load(sys.argv[1])(['a cat']); assert 'TBB_ENABLE_SANITIZERS' not in os.environ"
    path = [str(Path(__file__).parents[3]), *(p for p in sys.path if p)]
    done = subprocess.run(
        [sys.executable, "-c", code, str(artefact)], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": ":".join(path), "LD_PRELOAD": str(allocator)},
    )  # fmt: skip
    assert not done.returncode, done.stderr


def test_a_stage_holds_it(models: tuple[Eager, OpenVino], tmp_path: Path) -> None:
    _, model = models
    stages.write_form(model, tmp_path)
    manifest = stages.write_manifest(tmp_path, {"device": "cpu", **stages.describe(model)})
    assert set(manifest.files) == {"openvino/openvino_model.xml", "openvino/openvino_model.bin"}
    assert str(open_session(stages.open_stage(tmp_path)).facts().runtime).startswith("openvino")


def test_it_runs_on_the_cpu_only(models: tuple[Eager, OpenVino]) -> None:
    with pytest.raises(Unsupported, match="load with device='cpu'"):
        open_session(models[1], "cuda")


def batches(model: OpenVino, count: int) -> list[dict[str, np.ndarray]]:
    """Batches [B, S] of a shape of their own each."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        shape = (1 + number % 3, 2 + number)
        ids = rng.integers(5, model.spec.vocabulary, shape)
        arrays = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        found.append({name: arrays[name] for name in model.spec.inputs})
    return found


@pytest.mark.parametrize("streams", [1, 2])
def test_many_batches_are_answered_in_order_and_taken_as_they_are_needed(
    models: tuple[Eager, OpenVino], streams: int
) -> None:
    _, model = models
    session = OpenVinoSession(model, "cpu", threads=2, streams=streams)
    asked = batches(model, 9)
    expected = [session.run(batch)["logits"] for batch in asked]
    taken = 0

    def lazily() -> Iterator[dict[str, np.ndarray]]:
        nonlocal taken
        for batch in asked:
            taken += 1
            yield batch

    for number, answer in enumerate(session.run_all(lazily())):
        assert np.abs(answer["logits"] - expected[number]).max() <= 1e-5
        # One more batch waits for each that runs, and no more are taken.
        assert taken == min(number + 1 + 2 * streams, len(asked))
    assert number == len(asked) - 1
    assert (session.facts().streams, session.facts().threads) == (streams, 2)
    assert list(session.run_all(iter(()))) == []


def test_a_loop_left_early_leaves_a_session_that_still_runs(models: tuple[Eager, OpenVino]) -> None:
    session = OpenVinoSession(models[1], "cpu", threads=2, streams=2)
    asked = batches(models[1], 6)
    for _ in session.run_all(asked):
        break
    assert len(list(session.run_all(asked))) == 6

    def fails() -> Iterator[dict[str, np.ndarray]]:
        yield asked[0]
        raise ValueError("no more texts")

    with pytest.raises(ValueError, match="no more texts"):
        list(session.run_all(fails()))
    assert session.run(asked[0])["logits"].shape[0] == 1


def test_threads_may_share_a_session(models: tuple[Eager, OpenVino]) -> None:
    session = OpenVinoSession(models[1], "cpu", threads=2, streams=2)
    asked = batches(models[1], 12)
    expected = [session.run(batch)["logits"] for batch in asked]
    with ThreadPoolExecutor(6) as pool:
        for _ in range(5):
            for got, wanted in zip(pool.map(session.run, asked), expected, strict=True):
                assert np.abs(got["logits"] - wanted).max() <= 1e-5


def test_answers_outlive_the_next_run_and_strides_do_not_matter(models: tuple[Eager, OpenVino]) -> None:
    session = OpenVinoSession(models[1], "cpu", threads=1)
    first, second = batches(models[1], 2)
    held = session.run(first)["logits"]
    kept = held.copy()
    session.run(second)
    assert np.array_equal(held, kept)
    strided = {name: np.repeat(array, 2, axis=1)[:, ::2] for name, array in first.items()}
    assert np.array_equal(session.run(strided)["logits"], kept)


def test_facts_say_what_really_runs(models: tuple[Eager, OpenVino]) -> None:
    facts = OpenVinoSession(models[1], "cpu", threads=1).facts()
    # 12 products of the layers and one of the head; attention spelled out multiplies too.
    assert facts.products is not None and set(facts.products) == {"f32"} and facts.products["f32"] >= 13
    assert (facts.threads, facts.streams) == (1, 1)


def test_without_openvino_it_says_how_to_get_it(
    models: tuple[Eager, OpenVino], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(Unsupported, match=r"pip install 'bertopt\[openvino\]'"):
        OpenVinoSession(models[1], "cpu")


@pytest.mark.parametrize("isa", [["avx2"], ["avx2", "avx512f"]], ids=" ".join)
def test_one_short_text_has_a_model_of_its_own(models: tuple[Eager, OpenVino], isa: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without AVX-512 only texts that come out equal have: in INT8 the others differ too rarely to be seen."""
    monkeypatch.setattr(environment, "isa", lambda: isa)
    reference, model = models
    session, usual, spec = OpenVinoSession(model, "cpu", threads=1), open_session(reference), reference.spec
    wide = {name: np.repeat(array, 2, axis=0) for name, array in _full(spec, 5).items()}
    for others in (wide, _full(spec, 33)):
        session.run(others)
    assert not session._short
    longest = {8, 16, 32} if "avx512f" in isa else {8, 16}
    for length, compiled in ((5, {8}), (8, {8}), (9, {8, 16}), (3, {8, 16}), (17, longest)):
        one = _full(spec, length)
        expected = usual.run(one)
        for _ in range(2):
            session.load(one)
            session.step()
            got = session.run(one)
            session.run({**one, "input_ids": one["input_ids"] + 1})
            for name, value in session.fetch().items():
                assert np.array_equal(value, got[name]) and np.abs(value - expected[name]).max() <= 1e-5
        assert set(session._short) == compiled
        # Where this CPU has no AVX-512, the model for 32 tokens is seen to differ in float32.
        assert all(session._short[length] for length in compiled - {32})
    for others in (wide, _full(spec, 33)):
        assert session.run(others)["logits"].shape[0] == len(others["input_ids"])


@pytest.mark.parametrize("wrong", range(1, 9))
def test_a_short_model_that_answers_otherwise_is_not_used(
    models: tuple[Eager, OpenVino], monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """For texts of any number of tokens, whatever text comes first: AVX2 differs above 24 tokens alone."""
    session = OpenVinoSession(models[1], "cpu", threads=1)
    one = _full(models[0].spec, 5)
    usual = session._single.run(one)
    answers = Short.answers

    def differing(self: Short) -> dict[str, np.ndarray]:
        return {name: value + 1e-6 * (self._width == wrong) for name, value in answers(self).items()}

    monkeypatch.setattr(Short, "answers", differing)
    for _ in range(2):
        assert all(np.array_equal(value, usual[name]) for name, value in session.run(one).items())
    assert session._short == {8: {}}


@pytest.mark.parametrize("task", ["text-classification", "token-classification", "question-answering"])
def test_int8_is_run_in_whole_blocks_and_answered_as_asked(tiny: Tiny, export: Exports, tmp_path: Path, task: str) -> None:
    """The padding that a session adds shows in no answer. (The graph may be float32: blocks depend on what is claimed.)"""
    pytest.importorskip("openvino")
    reference = checkpoint.load(tiny(task=task))
    graph = export(UseSdpa()(reference, Context(tmp_path)).model, Context(tmp_path))
    path = tmp_path / "elsewhere" / "model.xml"
    openvino = openvino_import.openvino()
    openvino.save_model(openvino.Core().read_model(graph.path), path, compress_to_fp16=False)
    plain, blocks = (OpenVinoSession(OpenVino(reference.spec, kind, path), "cpu", 1) for kind in ("float32", "int8"))
    longest = reference.spec.max_length
    for batch in [*batches(OpenVino(reference.spec, "int8", path), 20), _full(reference.spec, longest - 3)]:
        for expected, got in zip(plain.run(batch).items(), blocks.run(batch).items(), strict=True):
            assert got[1].shape == expected[1].shape and np.abs(got[1] - expected[1]).max() <= 1e-5
            (streamed,) = blocks.run_all([batch])
            assert np.array_equal(streamed[got[0]], got[1])
        blocks.load(batch)
        rows, tokens = batch["input_ids"].shape
        block = next((length for length in (8, 16, 32) if tokens <= length), 16) if rows == 1 else 16
        assert _width_run(blocks) == min(-(-tokens // block) * block, longest)
        blocks.step()
        assert all(np.array_equal(value, streamed[name]) for name, value in blocks.fetch().items())


def _width_run(session: OpenVinoSession) -> int:
    return int(session._loaded.request.get_tensor("input_ids").shape[1])


def _full(spec: Spec, length: int) -> dict[str, np.ndarray]:
    arrays = {"input_ids": np.full((1, length), 7), "attention_mask": np.ones((1, length), np.int64)}
    arrays["token_type_ids"] = np.zeros((1, length), np.int64)
    return {name: arrays[name] for name in spec.inputs}


@pytest.mark.parametrize("rows", [1, 2])
def test_a_head_that_reads_padding_sees_no_more_of_it(tiny: Tiny, export: Exports, tmp_path: Path, rows: int) -> None:
    """Under left padding DeBERTa-v2's head reads a padding token, which attends evenly to all there is."""
    pytest.importorskip("openvino")
    reference = checkpoint.load(tiny(family="deberta-v2"))
    path = tmp_path / "elsewhere" / "model.xml"
    openvino = openvino_import.openvino()
    graph = export(reference, Context(tmp_path))
    openvino.save_model(openvino.Core().read_model(graph.path), path, compress_to_fp16=False)
    session = OpenVinoSession(OpenVino(reference.spec, "float32", path), "cpu", threads=1)
    ids = np.arange(5, 5 + 6 * rows).reshape(rows, 6)
    mask = np.ones_like(ids)
    mask[-1, :2] = 0
    inputs = {name: {"input_ids": ids, "attention_mask": mask}.get(name, 0 * ids) for name in reference.spec.inputs}
    expected = open_session(reference).run(inputs)["logits"]
    # Whether one short text gets a model of its own is decided at the first, which may have no padding.
    session.run({**inputs, "attention_mask": np.ones_like(ids)})
    (streamed,) = session.run_all([inputs])
    assert max(np.abs(got["logits"] - expected).max() for got in (session.run(inputs), streamed)) <= 1e-6
