"""Compare a stage's weights with its parent's: a cast must be exactly their rounding, a quantiser within half a step.

Two artefacts of one checkpoint are compared with each other in the same way: either may be rounded. A certificate looks at the files on disk.
It does not look at what a runtime does with them, which parity does.
"""

from __future__ import annotations

from bertopt import stages
from bertopt.core import Compiled, Eager, Model, Native, Onnx, OpenVino
from bertopt.results.fidelity import Certificate
from bertopt.stages.manifest import Manifest

#: Passes that leave every weight as it is.
_KEEP_WEIGHTS = ("use_sdpa",)
#: Forms of which two files are compared with each other.
_BESIDE = ("onnx", "openvino", "native")


def comparable(made: Manifest, parent: Manifest) -> bool:
    """Return whether the weights of a stage can be compared with those of `parent`: the stage that it was built from, or the checkpoint, of
    which an ONNX or OpenVINO graph keeps rows of its weights, and torch and a packed file whole ones where no pass changed them."""
    if made.passes[:-1] == parent.passes and made.passes:
        return True
    if parent.passes or (made.form == "native" and not all(record.name in _KEEP_WEIGHTS for record in made.passes[:-1])):
        return False
    return made.form in ("onnx", "openvino", "native", "eager", "compiled") and not stages.runs_foreign_code(made)


def unlike(made: Manifest, baseline: Manifest) -> str | None:
    """Return why the weights of an artefact cannot be compared with those of a `baseline` that it was not built from; None where they can."""
    if made.checkpoint_sha256 is None or baseline.checkpoint_sha256 is None:
        return "a manifest does not say which checkpoint it was made from"
    if made.checkpoint_sha256 != baseline.checkpoint_sha256:
        return "they were made from another checkpoint"
    if any(name.startswith("pass ") for manifest in (made, baseline) for name in manifest.sources or {}):
        return "a pass of your own may have changed them"
    if made.passes and made.passes[:-1] == baseline.passes and baseline.form == "onnx":
        return None
    if made.form != baseline.form or made.form not in _BESIDE:
        return f"form '{made.form}' beside form '{baseline.form}'"
    return None


def certify(model: Model, parent: Model) -> Certificate:
    """Compare the weights of `model`, made from `parent` by one pass, with the parent's."""
    if isinstance(model, Eager | Compiled) and isinstance(parent, Eager):
        from bertopt.stages import torch_certificate

        return torch_certificate.certify(model, parent)
    if isinstance(model, Onnx):
        from bertopt.stages import onnx_certificate

        if isinstance(parent, Eager):
            return onnx_certificate.exported(model, parent)
        if isinstance(parent, Onnx):
            return onnx_certificate.rewritten(model, parent)
    if isinstance(model, OpenVino) and isinstance(parent, Onnx | Eager):
        from bertopt.stages import openvino_certificate

        return openvino_certificate.certify(model, parent) if isinstance(parent, Onnx) else openvino_certificate.certify_by_rows(model, parent)
    if isinstance(model, Native) and isinstance(parent, Eager):
        from bertopt.stages import native_certificate

        return native_certificate.certify(model, parent)
    return Certificate(status="none", reason=f"weights of form '{model.form}' cannot be compared with form '{parent.form}'")


def between(model: Model, baseline: Model, same_build: bool) -> Certificate:
    """Compare the weights of an artefact with those of another one of the same checkpoint (see `unlike`).

    `same_build`: both were built by the same passes from the same inputs with the same libraries, so that the structure of their graphs must
    be one. `contradicted` where either has reduced precision and a weight of one cannot be the other's, rounded.
    """
    if isinstance(model, Onnx) and isinstance(baseline, Onnx):
        from bertopt.stages import onnx_certificate

        found = onnx_certificate.rewritten(model, baseline, same_build)
    elif isinstance(model, OpenVino) and isinstance(baseline, OpenVino):
        from bertopt.stages import openvino_walk

        found = openvino_walk.certify(model, baseline, same_build)
    elif isinstance(model, Native) and isinstance(baseline, Native):
        from bertopt.stages import native_certificate

        found = native_certificate.certify_beside(model, baseline)
    else:
        found = certify(model, baseline)
    return found.model_copy(update={"reason": found.reason.replace("the parent", "the baseline").replace("the ONNX graph", "the baseline")})
