"""Which files a stage may hold: its form's, and its parent's configuration and tokenizer, unchanged."""

from __future__ import annotations

import re

from bertopt import stages
from bertopt.errors import IntegrityError
from bertopt.stages.manifest import Manifest

_WEIGHTS = r"[^/]+\.safetensors(\.index\.json)?|rewrites\.json"
#: The files of each form; one that is not here has folders.
_OF_FORM = {
    "eager": _WEIGHTS, "compiled": _WEIGHTS, "onnx": r"onnx/model\.onnx(_data)?",
    "openvino": r"openvino/openvino_model\.(xml|bin)", "engine": r"engines/[^/]+/model\.plan",
}  # fmt: skip


def check(parent: Manifest, made: Manifest) -> None:
    """Raise IntegrityError for a file that is neither the form's nor the parent's, or that differs from the parent's.

    Configuration and tokenizer decide how texts are read, and parity is measured on texts that the reference's tokenizer
    read.
    """
    allowed = _OF_FORM.get(made.form, r"[^/]+/.+")
    inherited = {name: entry.sha256 for name, entry in parent.files.items() if stages.handed_down(name)}
    for name, entry in made.files.items():
        if name in inherited and entry.sha256 != inherited[name]:
            raise IntegrityError(f"'{name}' must be the parent's; the pass wrote another: leave it to be handed down")
        if name not in inherited and not re.fullmatch(allowed, name):
            raise IntegrityError(
                f"a stage of form '{made.form}' holds its parent's files and {allowed}; the pass wrote '{name}': keep it elsewhere"
            )
