"""Certify a torch network against its parent's: the same network, weights equal or rounded."""

from __future__ import annotations

import copy
from typing import Any

from bertopt.core import Compiled, Eager
from bertopt.results.fidelity import Certificate, contradiction
from bertopt.stages.fingerprint import fingerprint_network


def certify(model: Eager | Compiled, parent: Eager) -> Certificate:
    """Return `certified` where the parent's network, with its tensors cast as the child's are, is identical to the child's.

    `contradicted` in reduced precision where a tensor of the same name and shape is not the parent's rounded tensor; a weight in fp8 may
    differ by half a step of e4m3, times the `scale` beside it. `none` where the networks have different structures. Not seen: which layers
    are in fp8, which the effects show.
    """
    mine, theirs = _tensors(model.network), _tensors(parent.network)
    shared = [name for name, tensor in mine.items() if name in theirs and theirs[name].shape == tensor.shape]
    wrong = [name for name in shared if not _rounds(theirs[name], mine[name], mine.get(f"{name.removesuffix('weight')}scale"))]
    if wrong:
        reason = f"'{wrong[0]}' is not the parent's, rounded ({len(wrong)} of {len(shared)} tensors)"
        return Certificate(status=contradiction(model.precision), reason=reason, weights=len(shared))
    if len(shared) < max(len(mine), len(theirs)):
        return Certificate(status="none", reason="the network's tensors have other names or shapes than the parent's")
    cast: Any = copy.deepcopy(parent.network)
    for name, tensor in _tensors(cast).items():
        tensor.data = tensor.data.to(mine[name].dtype)
    cast.autocast_dtype = getattr(model.network, "autocast_dtype", None)
    if isinstance(model, Compiled) or fingerprint_network(cast) != fingerprint_network(model.network):
        return Certificate(
            status="none", reason="every tensor is the parent's, rounded, but other modules, code or hooks run", weights=len(shared)
        )
    return Certificate(status="certified", reason="the parent's network, every tensor rounded or equal", weights=len(shared))


def _tensors(network: Any) -> dict[str, Any]:
    named = [*network.named_parameters(remove_duplicate=False), *network.named_buffers(remove_duplicate=False)]
    return dict(named)


def _rounds(before: Any, after: Any, scale: Any) -> bool:
    import torch

    # A session has moved the stage's network to its device; the parent's lies on the CPU.
    before, after = before.detach().cpu(), after.detach().cpu()
    if after.dtype != torch.float8_e4m3fn:
        return bool(torch.equal(before.to(after.dtype), after))
    if before.dtype == after.dtype:
        return bool(torch.equal(before.view(torch.uint8), after.view(torch.uint8)))
    if scale is None:
        return False
    # Half of its last mantissa bit, or of the smallest step; a quotient in float32 adds a little.
    scale = scale.detach().cpu()
    most = torch.maximum(before.float().abs() * 2**-4, scale * 2**-10) * 1.001
    return bool(((after.float() * scale - before.float()).abs() <= most).all())
