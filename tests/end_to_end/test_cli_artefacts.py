"""The commands that take an artefact: inspect, verify, compare, bench."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import Result

import bertopt
from bertopt import stages
from tests.support.command_line import call, last_line
from tests.support.shared_workers import SharedWorkers, cheap_workers
from tests.support.tiny_models import Tiny


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify", "commands.compare", "commands.bench") as shared:
        yield shared


def test_inspect(exported: tuple[Path, Result]) -> None:
    directory = exported[0] / "artifact"
    found = call("inspect", str(directory))
    assert found.exit_code == 0
    assert all(words in found.stdout for words in ("form: eager, float32", "bert, text-classification", "passes: use_sdpa", "model.safetensors", "parity: "))  # fmt: skip
    assert stages.Manifest.model_validate_json(call("inspect", str(directory), "--json").stdout) == stages.read_manifest(directory)
    found = call("inspect", str(directory.parent))
    assert found.exit_code == 2 and f"no manifest.json; did you mean '{directory}'?" in last_line(found)


def test_verify_says_that_the_signature_holds(exported: tuple[Path, Result], tmp_path: Path) -> None:
    copy = shutil.copytree(exported[0] / "artifact", tmp_path / "signed")
    assert call("sign", str(copy), "--key", str(tmp_path / "mine.pem"), "--new-key").exit_code == 0
    found = call("verify", str(copy), "--key", str(tmp_path / "mine.pem.pub"))
    assert found.exit_code == 0 and "signed with mine.pem.pub; files are as exported" in found.stdout


def test_what_is_no_artefact_is_named_with_what_to_do(tiny: Tiny, tmp_path: Path) -> None:
    for given, words in ((tmp_path / "none", f"there is no '{tmp_path / 'none'}'"), (tmp_path, "give a directory that bertopt wrote"),
                         (tiny() / "config.json", "is a file; give the directory of a stage or artefact"),
                         (tiny(), f"it is a checkpoint: make an artefact of it with `bertopt optimize {tiny()}`")):  # fmt: skip
        found = call("inspect", str(given))
        assert found.exit_code == 2 and words in last_line(found)


def test_compare_names_the_path_that_is_neither(exported: tuple[Path, Result], tmp_path: Path) -> None:
    artefact = str(exported[0] / "artifact")
    for given in ((artefact, str(tmp_path / "none")), (str(tmp_path / "none"), artefact)):
        found = call("compare", *given)
        assert found.exit_code == 2 and f"'{tmp_path / 'none'}" in last_line(found) and "cannot be read" in last_line(found)


def test_an_unknown_limit_is_named(exported: tuple[Path, Result]) -> None:
    found = call("verify", str(exported[0] / "artifact"), "--limits", "rel_l3=1")
    assert found.exit_code == 2 and last_line(found) == "--limits rel_l3=1: unknown limit; did you mean 'rel_l2'?"


def test_a_file_where_a_directory_goes(exported: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    found = call("report", str(exported[0]), "--pictures", str(tmp_path / "file"))
    assert found.exit_code == 2 and "expected a directory, got a file" in last_line(found)
    assert (tmp_path / "file").read_text() == "mine"


def test_verify_and_profile_refuse_before_anything_slow(exported: tuple[Path, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    artefact = str(exported[0] / "artifact")
    for place in ("verify", "profile"):
        monkeypatch.setattr(f"bertopt.commands.{place}.Workers", lambda: pytest.fail("a worker was started"))
    found = call("verify", artefact, "--against", "/no/such/model")
    assert found.exit_code == 2 and "neither a directory nor a hub id" in last_line(found)
    found = call("profile", artefact, "--shape", "1x9999")
    assert found.exit_code == 2 and "must fit the model's 64 tokens; got 1 × 9999" in last_line(found)


def test_verify(exported: tuple[Path, Result], tiny: Tiny) -> None:
    directory = str(exported[0] / "artifact")
    found = call("verify", directory)
    assert found.exit_code == 0 and "files are as exported" in found.stdout
    found = call("verify", directory, "--against", str(tiny()))
    assert found.exit_code == 0 and "still the same model" in found.stdout
    for doing in (f"reference: loading {tiny()}", ": parity", ": latency", ": every id and length"):
        assert doing in found.stderr, "minutes without a word"
    found = call("verify", directory, "--against", str(tiny()), "--json")
    assert json.loads(found.stdout)["stages"][1]["parity"]["passed"] is True


@pytest.mark.parametrize("seed", [0, 1], ids=["same", "other"])
def test_verify_shows_a_worst_case_of_a_text(exported: tuple[Path, Result], tiny: Tiny, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of its tokens need the reference's tokenizer, after everything was measured."""
    for random in ("probes.grid", "probes.serving", "padding_patterns.probes"):
        monkeypatch.setattr(f"bertopt.pipeline.examiner.{random}", lambda *_: [])
    found = call("verify", str(exported[0] / "artifact"), "--against", str(tiny(seed=seed)), "--json")
    assert found.exit_code == 3 * seed, found.stderr
    assert json.loads(found.stdout)["stages"][1]["parity"]["worst"]["text"] is not None


def test_verify_against_another_model(exported: tuple[Path, Result], tiny: Tiny) -> None:
    directory = str(exported[0] / "artifact")
    found = call("verify", directory, "--against", str(tiny(seed=1)))
    assert found.exit_code == 3 and last_line(found).startswith("'use_sdpa' failed: ")
    found = call("verify", directory, "--against", str(tiny(task="fill-mask")))
    assert found.exit_code == 2 and "was trained for fill-mask" in found.stderr
    found = call("verify", directory, "--against", str(exported[0] / "nothing"))
    assert found.exit_code == 2


def test_verify_refuses_texts_that_it_would_not_use(exported: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n")
    found = call("verify", str(exported[0] / "artifact"), "--texts", str(tmp_path / "t.txt"))
    assert found.exit_code == 2 and "give --against CHECKPOINT too" in last_line(found)


def test_verify_against_an_earlier_report(exported: tuple[Path, Result], tmp_path: Path) -> None:
    out, _ = exported
    files = ("--junit", str(tmp_path / "j.xml"), "--summary", str(tmp_path / "s.md"))
    slack = ("--slower", "1e9", "--memory", "9")
    command = ("verify", str(out / "artifact"), "--texts", str(tmp_path / "t.txt"), *slack, *files)
    (tmp_path / "t.txt").write_text("the cat sat on the mat\n")
    found = call(*command, "--baseline", str(out))
    assert found.exit_code == 0 and "differs: " not in found.stdout, found.stderr + found.stdout
    assert "bertopt compare: no regression" in (tmp_path / "s.md").read_text()
    assert [suite.attrib["failures"] for suite in ElementTree.parse(tmp_path / "j.xml").getroot()] == ["0", "0"]
    before = json.loads((out / "report.json").read_text())
    before["stages"][1]["size_bytes"] //= 2
    (tmp_path / "smaller.json").write_text(json.dumps(before))
    found = call(*command, "--baseline", str(tmp_path / "smaller.json"), "--json")
    assert found.exit_code == 3 and last_line(found).startswith("'use_sdpa' regressed: size grew from ")
    assert json.loads(found.stdout)["model"]["comparison"]["exit_code"] == 3
    (tmp_path / "failed.json").write_text(json.dumps({**before, "delivered": None}))
    found = call(*command, "--baseline", str(tmp_path / "failed.json"))
    assert found.exit_code == 2 and "delivered nothing" in last_line(found)


def test_compare(exported: tuple[Path, Result], tmp_path: Path) -> None:
    out, _ = exported
    copy, text = tmp_path / "copy", tmp_path / "s.md"
    shutil.copytree(out / "artifact", copy)
    slack = ("--slower", "1e9", "--memory", "9")
    found = call("compare", str(out / "artifact"), str(copy), *slack, "--summary", str(text))
    assert found.exit_code == 0, found.stderr
    assert "rel_l2" in found.stdout and "no regression" in last_line(found) and "## bertopt compare" in text.read_text()
    found = call("compare", str(out), str(out / "report.json"), "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["changes"]
    before = json.loads((out / "report.json").read_text())
    del before["stages"][1]
    (tmp_path / "less.json").write_text(json.dumps(before))
    found = call("compare", str(out), str(tmp_path / "less.json"), "--junit", str(tmp_path / "j.xml"))
    assert found.exit_code == 3
    assert last_line(found) == "'use_sdpa' regressed: the stage is missing; the baseline has it"
    assert ElementTree.parse(tmp_path / "j.xml").getroot().attrib["failures"] == "1"
    assert call("compare", str(out), str(tmp_path / "none")).exit_code == 2
    assert call("compare", str(out), str(out), "--limits", "rel_l3=1").exit_code == 2
    assert call("compare", str(out), str(out), "--slower", "-1").exit_code == 2


def test_verify_pairs(recipe: Path, tiny: Tiny, tmp_path: Path) -> None:
    """A question-answering artefact is tried with pairs."""
    model = tiny(task="question-answering")
    assert call("export", str(recipe), "--out", str(tmp_path), "--set", f"model={model}").exit_code == 0
    assert call("verify", str(tmp_path / "artifact")).exit_code == 0
    assert call("verify", str(tmp_path / "artifact"), "--against", str(model)).exit_code == 0


@pytest.mark.parametrize("damage", ["change", "remove", "add", "manifest"])
def test_a_tampered_artefact(exported: tuple[Path, Result], tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "artifact"
    shutil.copytree(exported[0] / "artifact", directory)
    if damage == "change":
        with (directory / "model.safetensors").open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
    elif damage == "remove":
        (directory / "tokenizer.json").unlink()
    elif damage == "add":
        (directory / "pytorch_model.bin").write_bytes(b"\x80")
    else:
        (directory / "manifest.json").write_text('{"schema_version": 1')
    found = call("verify", str(directory))
    assert found.exit_code == 6 and "export again" in last_line(found)
    with pytest.raises(bertopt.BertoptError):
        bertopt.load(directory)


def test_bench_times_artefacts_against_the_first(exported: tuple[Path, Result]) -> None:
    (reference,) = (exported[0] / "stages").glob("reference-*")
    artefact, first = str(exported[0] / "artifact"), str(reference)
    found = call("bench", first, artefact, "--shape", "2x8", "--seconds", "0.1", "--json")
    assert found.exit_code == 0, found.stderr
    rows = json.loads(found.stdout)["artefacts"]
    assert [row["directory"] for row in rows] == [first, artefact]
    cases = [[(case["kind"], case["batch"], case["sequence"]) for case in row["latency"]] for row in rows]
    assert cases == [[("shape", 2, 8), ("mix", None, None)]] * 2
    assert all(case["vs_reference"] is None for case in rows[0]["latency"])
    assert all(case["vs_reference"]["ratio"] > 0 and case["p50_ms"] > 0 for case in rows[1]["latency"])
    shown = call("bench", artefact, "--seconds", "0.1")
    assert shown.exit_code == 0 and "1 × 8" in shown.stdout and "end to end" in shown.stdout


def test_bench_takes_only_signed_artefacts_where_a_key_is_given(exported: tuple[Path, Result], tmp_path: Path) -> None:
    artefact, key = exported[0] / "artifact", tmp_path / "mine.pem"
    copy = shutil.copytree(artefact, tmp_path / "signed")
    assert call("sign", str(copy), "--key", str(key), "--new-key").exit_code == 0
    assert call("bench", str(copy), "--shape", "1x8", "--seconds", "0.1", "--key", f"{key}.pub").exit_code == 0
    found = call("bench", str(copy), str(artefact), "--shape", "1x8", "--seconds", "0.1", "--key", f"{key}.pub")
    assert found.exit_code == 6 and f"'{artefact}'" in found.stderr and "timing" not in found.stderr


def test_bench_refuses_what_it_cannot_time(exported: tuple[Path, Result], tmp_path: Path) -> None:
    artefact = str(exported[0] / "artifact")
    for arguments, words in (
        (("--shape", "8*16"), "--shape 8*16: expected BATCHxTOKENS, such as 8x128"),
        (("--shape", "1x9999"), "sequence must be at most"),
        ((str(tmp_path),), "is not a bertopt stage or artefact"),
        (("pkg://a/b",), "which `bertopt optimize MODEL` makes"),
    ):
        found = call("bench", artefact, *arguments)
        assert found.exit_code == 2 and words in found.stderr, found.stderr
