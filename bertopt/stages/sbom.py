"""The bill of materials of an artefact: the Python distributions that built it, as CycloneDX JSON.

It lists bertopt and its direct and indirect dependencies that are installed, but not other distributions in the environment, nor
libraries inside a wheel (such as MKL in torch's).
"""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any

from bertopt._version import __version__
from bertopt.system import environment

NAME = "sbom.cdx.json"
#: Extras of bertopt whose distributions can take part in building an artefact.
_EXTRAS = ("", "cpu", "gpu", "rtx", "sign")


def write(model: str) -> str:
    """Return the bill of materials of an artefact made from the checkpoint `model`. Equal in equal environments."""
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {"components": [{"type": "application", "name": "bertopt", "version": __version__}]},
            "component": {"type": "machine-learning-model", "name": model},
        },
        "components": [_component(found) for _, found in sorted(distributions().items())],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def distributions() -> dict[str, metadata.Distribution]:
    """Return the installed distributions that bertopt depends on, itself included, by normalised name."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    waiting = ["bertopt", *environment.describe()["packages"]]  # the latter where bertopt runs from its sources
    while waiting:
        name = _normal(waiting.pop())
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # an extra that is not installed
            continue
        extras = _EXTRAS if name == "bertopt" else ("",)
        for required in map(Requirement, found[name].requires or ()):
            if required.marker is None or any(required.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(required.name)
    return found


def licence(found: metadata.Distribution) -> str | None:
    """Return the licence that a distribution states, in the shortest form it has, or None."""
    fields: Any = found.metadata
    if expression := fields.get("License-Expression"):
        return str(expression)
    classified = [line.rpartition(" :: ")[2] for line in fields.get_all("Classifier") or () if line.startswith("License ::")]
    if classified:
        return " and ".join(classified)
    # Some put the whole text there.
    first: str = str(fields.get("License") or "").strip().partition("\n")[0]
    return first[:100] or None


def _component(found: metadata.Distribution) -> dict[str, Any]:
    name = _normal(found.metadata["Name"])
    entry: dict[str, Any] = {"type": "library", "name": name, "version": found.version, "purl": f"pkg:pypi/{name}@{found.version}"}
    if (said := licence(found)) is not None:
        entry["licenses"] = [{"license": {"name": said}}]
    return entry


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
