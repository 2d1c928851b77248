"""Certify a file of the native encoder: its weights are the parent's, rounded to their format, and its task head is the parent's."""

from __future__ import annotations

import numpy as np

from bertopt.core import Eager, Native
from bertopt.modeling.float_head import FILE, FloatHead, plain
from bertopt.results.fidelity import Certificate
from bertopt.system import native_import


def certify(model: Native, parent: Eager) -> Certificate:
    """Return `certified` where every table, bias and norm is the parent's, bit for bit, and every weight of a product is rounded to bf16 or
    within half a step of INT8; otherwise `contradicted`.

    Not seen: the order of channels, which shows in the outputs, and what the encoder does with the file.
    """
    module = native_import.native()
    config, tensors, after_pooling = plain(parent.network)
    with native_import.native_errors(module):
        compared, difference = module.compare(model.path, config, tensors)
    if difference is None:
        expected, path = FloatHead.of(model.spec, {**tensors, **after_pooling}, config), model.path.with_name(FILE)
        found = FloatHead.read(path) if path.exists() else None
        compared += len(expected.tensors) if expected is not None else 0
        if not _equal(found, expected):
            difference = f"the task head in '{FILE}' is not the checkpoint's"
    if difference is not None:
        return Certificate(status="contradicted", reason=difference, weights=compared)
    return Certificate(status="certified", reason="every weight is the checkpoint's, equal or rounded to its format", weights=compared)


def _equal(found: FloatHead | None, expected: FloatHead | None) -> bool:
    if found is None or expected is None:
        return found is expected
    same = found.steps == expected.steps and found.tensors.keys() == expected.tensors.keys()
    return same and all(np.array_equal(found.tensors[name], tensor) for name, tensor in expected.tensors.items())
