"""What bertopt brings along: pinned with hashes in the server's image, and under licences that a product may carry.

What this does not see: known vulnerabilities, for which a network is needed (SECURITY.md), and the libraries inside a wheel.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bertopt.stages import sbom

ROOT = Path(__file__).parents[3]
LOCK = ROOT / "deploy" / "docker" / "serve.lock"
#: As distributions spell them. Weak copyleft (MPL-2.0) is used unchanged.
PERMISSIVE = re.compile(r"MIT|BSD|Apache|ISC|PSF|Python|0BSD|Zlib|CC0|BSL-1\.0|MPL-2\.0|CNRI|Unlicense", re.IGNORECASE)
#: TensorRT, and the libraries of CUDA that torch's builds for GPUs bring.
PROPRIETARY = re.compile(r"tensorrt(-rtx(-cu13(-bindings|-libs)?)?)?|cuda-toolkit|nvidia-.+")


def pins(path: Path) -> dict[str, str]:
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", path.read_text("utf-8"), re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def test_the_lock_is_of_the_versions_that_are_tested_and_has_their_hashes() -> None:
    locked, tested = pins(LOCK), pins(ROOT / "constraints.txt")
    assert {name: version for name, version in locked.items() if tested.get(name) != version} == {}
    entries = re.split(r"^(?=[A-Za-z0-9])", LOCK.read_text("utf-8"), flags=re.MULTILINE)[1:]
    assert len(entries) == len(locked) > 30
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for entry in entries)


def test_the_lock_holds_all_that_the_server_installs_and_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(line for name in ("serve", "openvino", "onnxruntime", "sign") for line in extras[name])]
    locked = pins(LOCK)
    assert {canonicalize_name(Requirement(line).name) for line in wanted} <= locked.keys()
    assert not locked.keys() & {"torch", "transformers", "optimum", "nncf"}


def test_licences_are_permissive_but_for_those_of_nvidia() -> None:
    named = {name: sbom.licence(found) or "" for name, found in sbom.distributions().items()}
    assert len(named) > 30
    assert {name: licence for name, licence in named.items() if not PERMISSIVE.search(licence) and not PROPRIETARY.fullmatch(name)} == {}
    assert not [name for name, licence in named.items() if re.search(r"\b(A|L)?GPL", licence)]
