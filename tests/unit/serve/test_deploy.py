"""The files of deploy/: they are read, and name only commands, options and routes that exist.

What this does not see: whether a cluster, Docker or a CI service takes them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from bertopt.cli import app
from bertopt.commands.recipes import find
from bertopt.errors import IntegrityError, Unsupported, UsageError, WrongAnswer
from bertopt.recipe import load

DEPLOY = Path(__file__).parents[3] / "deploy"
COMMANDS: Any = typer.main.get_command(app)
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.parent.name in ("docker", "ci", "systemd", "kubernetes")]


def calls(text: str) -> list[list[str]]:
    """Command lines that begin with bertopt, and the server's arguments in Kubernetes."""
    found = [shlex.split(line) for line in re.findall(r"(?:bin/)?(bertopt (?:export|verify|serve) .*?)(?: \\)?$", text, re.MULTILINE)]
    found += [["bertopt", "serve", *yaml.safe_load(part)] for part in re.findall(r"^\s+args: (\[.*\])$", text, re.MULTILINE)]
    found += [list(yaml.safe_load(part)) for part in re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_options_exist(path: Path) -> None:
    for _, *arguments in calls(path.read_text()):
        if not arguments:
            continue
        known = {option for parameter in COMMANDS.commands[arguments[0]].params for option in parameter.opts}
        assert {one for one in arguments if one.startswith("--")} <= known, arguments


def test_kubernetes_objects_fit_together() -> None:
    objects = {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "bertopt.yaml").read_text())}
    pod = objects["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    arguments = container["args"]
    drain, grace = (float(arguments[arguments.index(name) + 1]) for name in ("--drain", "--grace"))
    assert pod["spec"]["terminationGracePeriodSeconds"] > drain + grace
    assert container["securityContext"]["readOnlyRootFilesystem"] and pod["spec"]["securityContext"]["runAsNonRoot"]
    for kind in ("Service", "PodDisruptionBudget"):
        selector = objects[kind]["spec"]["selector"]
        assert (selector.get("matchLabels") or selector).items() <= pod["metadata"]["labels"].items()
    assert objects["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]


def test_the_server_image_runs_as_nobody_and_has_no_torch() -> None:
    text = (DEPLOY / "docker" / "Dockerfile.serve").read_text()
    assert "USER 10001" in text and "HEALTHCHECK" in text and "torch" not in text.split("FROM", 1)[1]


def test_the_server_image_has_the_runtime_of_its_default_artefact() -> None:
    text = (DEPLOY / "docker" / "Dockerfile.serve").read_text()
    (runtime,), (recipe,) = set(re.findall(r"ARG RUNTIME=(\w+)", text)), set(re.findall(r"ARG ARTIFACT=out/(\w+)/artifact", text))
    form = load(find(recipe)).steps[-1].pass_.forms()[1].form
    assert {"onnx": "onnxruntime", "openvino": "openvino"}[form] == runtime


def test_systemd_does_not_restart_what_a_restart_does_not_mend() -> None:
    text = (DEPLOY / "systemd" / "bertopt.service").read_text()
    (codes,) = re.findall(r"RestartPreventExitStatus=(.*)", text)
    assert {int(code) for code in codes.split()} == {error.exit_code for error in (UsageError, WrongAnswer, Unsupported, IntegrityError)}


def test_ci_files_export_verify_and_publish() -> None:
    for name in ("github-actions.yml", "gitlab-ci.yml"):
        text = (DEPLOY / "ci" / name).read_text()
        assert yaml.safe_load(text)
        assert [call[1] for call in calls(text)] == ["export", "verify"] and "out/artifact" in text
