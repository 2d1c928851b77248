"""Check that a stage holds only the files of its form and its parent's configuration and tokenizer, unchanged."""

from __future__ import annotations

import re

from bertopt import stages
from bertopt.core import Spec
from bertopt.errors import IntegrityError, WrongAnswer
from bertopt.stages.manifest import Manifest

_WEIGHTS = r"[^/]+\.safetensors(\.index\.json)?|rewrites\.json"
#: The files of each form; forms that are not listed may have any files in folders.
_OF_FORM = {
    "eager": _WEIGHTS, "compiled": _WEIGHTS, "onnx": r"onnx/model\.onnx(_data)?",
    "openvino": r"openvino/openvino_model\.(xml|bin)", "engine": r"engines/[^/]+/model\.plan",
}  # fmt: skip
#: The same in words. Loaders of other libraries look for these names.
_NAMED = {
    "eager": "*.safetensors", "compiled": "*.safetensors", "onnx": "onnx/model.onnx and onnx/model.onnx_data",
    "openvino": "openvino/openvino_model.xml and openvino/openvino_model.bin", "engine": "engines/*/model.plan",
}  # fmt: skip


#: The fields of a Spec that decide how texts are tokenised and answers are worded, which manifests of all versions have.
_SAID = (
    "task", "inputs", "labels", "multi_label", "regression", "pooling", "dense", "normalize", "max_length", "text_length", "pad_id", "vocabulary",
    "token_types",
)  # fmt: skip


def check_artefact(reference: Manifest, artefact: Manifest) -> list[str]:
    """Raise WrongAnswer where an artefact tokenises texts or words answers differently from its checkpoint, though outputs may be equal.

    Return a warning for each file that differs but was written by other versions of the libraries, which may write it differently.
    """
    check_said(reference.spec, artefact.spec, "the artefact's {} must be the checkpoint's, {}; got {}: export again")
    then, now = (manifest.environment.get("packages", {}) for manifest in (artefact, reference))
    same = all(then.get(package) == now.get(package) for package in ("transformers", "tokenizers"))
    files = {name: entry.sha256 for name, entry in artefact.files.items()}
    other = [name for name, entry in reference.files.items() if stages.handed_down(name) and files.get(name) != entry.sha256]
    another = artefact.checkpoint_sha256 not in (None, reference.checkpoint_sha256)
    if other and same and artefact.bertopt_version == reference.bertopt_version:
        # In the hub's cache a download that was interrupted looks like a checkpoint with fewer files.
        advice = "give the checkpoint that the artefact was made of, whose files are others or more" if another else "restore it, or export again"
        raise WrongAnswer(f"'{other[0]}' of the artefact must be the checkpoint's; it differs: {advice}")
    warnings = [f"'{name}' is not byte for byte what these versions of bertopt and transformers write for the checkpoint" for name in other]
    if another:
        warnings.append(
            f"the checkpoint's files differ from those that the artefact was made of (sha256 {str(reference.checkpoint_sha256)[:12]}, "
            f"then {str(artefact.checkpoint_sha256)[:12]})"
        )
    return warnings


def check_said(expected: Spec, got: Spec, message: str) -> None:
    """Raise WrongAnswer where a field that decides how texts are tokenised or answers are worded differs.

    `message` is a format string for the field's name and both values.
    """
    for name in _SAID:
        first, second = getattr(expected, name), getattr(got, name)
        if first != second:
            raise WrongAnswer(message.format(name, first, second))


def check(parent: Manifest, made: Manifest) -> None:
    """Raise IntegrityError for a file that is neither the form's nor the parent's, or that differs from the parent's.

    Configuration and tokenizer decide how texts are tokenised, and parity would not show it: it uses the reference's tokenizer.
    """
    allowed = _OF_FORM.get(made.form, r"[^/]+/.+")
    inherited = {name: entry.sha256 for name, entry in parent.files.items() if stages.handed_down(name)}
    for name, entry in made.files.items():
        if name in inherited and entry.sha256 != inherited[name]:
            raise IntegrityError(f"'{name}' must be the parent's; the pass wrote another: do not write it, bertopt adds the parent's")
        if name not in inherited and not re.fullmatch(allowed, name):
            raise IntegrityError(
                f"a stage of form '{made.form}' may hold its parent's files and {_NAMED.get(made.form, 'files in folders')}; the pass wrote '{name}': "
                "give it such a name, or leave it out"
            )
