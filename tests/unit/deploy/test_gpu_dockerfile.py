"""The GPU's Dockerfile as text: no container was built here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from typer.testing import CliRunner

from bertopt.cli import main  # noqa: F401  (registers every command)
from bertopt.cli.app import app
from bertopt.commands import doctor, recipes
from bertopt.system.gpu import GpuState
from bertopt.system.gpu_facts import GpuFacts
from bertopt.system.machine import Machine

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "deploy" / "docker"
TEXT = (DOCKER / "gpu.Dockerfile").read_text("utf-8")
LINES = re.sub(r"\\\n\s*", "", "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))).splitlines()


def test_everything_is_pinned() -> None:
    tag = next(line for line in LINES if line.startswith("ARG PYTHON="))
    assert re.fullmatch(r"ARG PYTHON=3\.\d+\.\d+-slim-\w+", tag)
    assert [line.split()[1] for line in LINES if line.startswith("FROM")] == ["python:${PYTHON}", "base", "base"]
    pins = {re.split("==| @", line)[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if line}
    own = (DOCKER / "gpu-constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in own)
    named = {package for line in LINES for package in re.findall(r"pip install -c \S+ ([\w .-]+?)(?= &&|$)", line)}
    packages = {package for group in named for package in group.split()} - {"."}
    assert packages and packages <= pins | {pin.split("==")[0] for pin in own}


def test_all_that_building_needs_is_installed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    asked = [word.strip("'\"") for line in LINES for words in re.findall(r"pip install -c \S+ ([^&|]+)", line) for word in words.split()]
    brought = {extra for word in asked if word.startswith(".[") for extra in word[2:-1].split(",")}
    installed = {Requirement(line).name for extra in brought for line in extras[extra]} | {word for word in asked if word[0] != "."}
    assert {Requirement(line).name for line in extras["build"]} <= installed
    # The build begins with the doctor, which stops at what is missing.
    machine = Machine(packages=dict.fromkeys({*installed, "tokenizers", "safetensors", "numpy"}, "1"), gpus=1, gpu=GpuFacts(state=GpuState()))
    recipe = next(line for line in LINES if line.startswith("ARG RECIPE=")).split("=")[1]
    diagnosis = doctor.diagnose(machine, doctor.asked_recipe(recipe, None))
    assert diagnosis.exit_code == 0, diagnosis.findings


def test_the_pins_of_both_builds_are_of_one_version() -> None:
    cpu = (ROOT / "constraints.txt").read_text()
    for pin in (DOCKER / "gpu-constraints.txt").read_text().split():
        name, version = pin.removesuffix("\n").split("==")
        at = re.search(rf"^{name.removesuffix('-gpu')}==([\d.]+)", cpu, re.MULTILINE)
        assert at is not None and at[1] == version, name


def test_the_last_stage_runs_as_no_root_and_the_build_exports_and_verifies() -> None:
    last = LINES[max(number for number, line in enumerate(LINES) if line.startswith("FROM")) :]
    assert "USER bertopt" in last and "useradd" in TEXT
    (run,) = [line for line in LINES if line.startswith("RUN --device")]
    assert run.index("bertopt doctor") < run.index("bertopt export") < run.index("bertopt verify")
    before = LINES[: LINES.index(run)]
    assert [line for line in before if line.startswith("USER")] == ["USER bertopt"]


def test_recipe_and_options_exist() -> None:
    recipe = next(line for line in LINES if line.startswith("ARG RECIPE=")).split("=")[1]
    assert recipe in {row.name for row in recipes.shipped()}
    for command, options in (("export", ["--set", "--out"]), ("verify", ["--against"]), ("doctor", [])):
        text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).output
        assert all(option in text for option in options)
    for name in re.findall(r"^COPY (?!--)(.+) \S+$", "\n".join(LINES), re.MULTILINE):
        assert all((ROOT / file).exists() for file in name.split())
