"""The files for continuous integration of commands that an error ends: what an earlier run wrote must not stay."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import Result

from tests.support.command_line import call, last_line
from tests.support.shared_workers import SharedWorkers, cheap_workers


@pytest.fixture(scope="module", autouse=True)
def workers() -> Iterator[SharedWorkers]:
    with cheap_workers("pipeline", "commands.verify", "commands.compare") as shared:
        yield shared


@pytest.mark.parametrize("command", ["verify", "verify --url", "compare", "export"])
def test_an_error_before_the_report_is_the_one_case_of_the_files(exported: tuple[Path, Result], tmp_path: Path, command: str) -> None:
    artifact = exported[0] / "artifact"
    damaged = shutil.copytree(artifact, tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("schema_version: 1\nmodel: nowhere/at-all\nstepz: []\n")
    xml, text = tmp_path / "j.xml", tmp_path / "s.md"
    for file in (xml, text):
        file.write_text("of an earlier run that passed")
    given, code = {
        "verify": ([str(damaged)], 6), "verify --url": ([str(artifact), "--url", "http://127.0.0.1:9"], 4), "compare": ([str(artifact), str(damaged)], 6),
        "export": ([str(recipe), "--out", str(tmp_path / "out")], 2),
    }[command]  # fmt: skip
    found = call(command.split(maxsplit=1)[0], *given, "--junit", str(xml), "--summary", str(text))
    assert found.exit_code == code
    suites = ElementTree.parse(xml).getroot()
    assert (suites.get("tests"), suites.get("errors")) == ("1", "1")
    case = suites.find("testsuite/testcase/error")
    assert case is not None and case.text and case.text.splitlines()[-1] == last_line(found)
    assert text.read_text("utf-8").startswith(f"## bertopt: failed (exit code {code})")
