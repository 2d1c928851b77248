"""The bill of materials of an artefact."""

from __future__ import annotations

import json
from importlib import metadata

from bertopt.stages import sbom


def test_it_lists_what_bertopt_depends_on_with_versions_and_licences() -> None:
    document = json.loads(sbom.write("org/name"))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"] == {"type": "machine-learning-model", "name": "org/name"}
    listed = {entry["name"]: entry for entry in document["components"]}
    assert listed["torch"]["version"] == metadata.version("torch")
    assert listed["safetensors"]["purl"] == f"pkg:pypi/safetensors@{metadata.version('safetensors')}"
    assert {"transformers", "numpy", "typing-extensions", "huggingface-hub"} <= set(listed)  # the last two are dependencies of dependencies
    assert all(entry["licenses"][0]["license"]["name"] for name, entry in listed.items() if name in ("torch", "numpy"))
    assert sbom.write("org/name") == sbom.write("org/name")
