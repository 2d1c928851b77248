"""Write a copy of an artefact with other weights: a second model with the same passes, as a service may load beside the first."""

from __future__ import annotations

import shutil
from pathlib import Path

from bertopt import stages


def write(directory: Path, out: Path) -> None:
    """Write to `out` a copy of the artefact of a torch network in `directory`, with the elements of each tensor in reverse order.

    So all values occur in a trained model: passes may take square roots of them, or look for the largest.
    """
    from safetensors.torch import load_file, save_file

    manifest = stages.read_manifest(directory)
    for name in manifest.files:
        source, target = directory / name, out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".safetensors":
            shutil.copyfile(source, target)
            continue
        tensors = load_file(source)
        changed = {key: value.flatten().flip(0).reshape(value.shape) if value.is_floating_point() else value for key, value in tensors.items()}
        save_file(changed, target, {"format": "pt"})
    stages.write_manifest(out, manifest.model_dump(mode="json", exclude={"files", "manifest_sha256"}))
