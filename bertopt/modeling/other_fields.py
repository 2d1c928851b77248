"""Fields of config.json that a checkpoint's own code used, but transformers' class of the same family ignores in favour of its defaults.

There are many copies of such checkpoints of families that first came with their own code; their tensors fit either way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from bertopt.errors import CheckpointWarning, Unsupported
from bertopt.system.untrusted import plain

#: By family: the name there, and transformers' own.
_RENAMED: dict[str, dict[str, str]] = {
    "nomic_bert": {
        "n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_inner": "intermediate_size",
        "layer_norm_epsilon": "layer_norm_eps", "rotary_emb_base": "rope_theta",
    },
    "eurobert": {"clf_pooling": "classifier_pooling"},
}  # fmt: skip
#: By family: the name there, and the one value that transformers' network is for.
_FIXED: dict[str, dict[str, Any]] = {
    "nomic_bert": {
        "activation_function": "swiglu", "prenorm": False, "causal": False, "parallel_block": False, "use_rms_norm": False,
        "rotary_emb_fraction": 1.0, "rotary_emb_interleaved": False, "rotary_emb_scale_base": None,
    },
    # PaddlePaddle's ERNIE has a choice of these.
    "ernie": {"pool_act": "tanh", "task_id": 0},
    "gte": {"logn_attention_scale": False, "layer_norm_type": "layer_norm", "position_embedding_type": "rope"},
}  # fmt: skip


def check(fields: Mapping[str, Any], config: Any) -> None:
    """Raise Unsupported where a field of config.json (`fields`) with another name contradicts transformers' `config`.

    Warn where texts are truncated earlier than it says.
    """
    family = config.model_type
    for name, own in _RENAMED.get(family, {}).items():
        used = config.rope_parameters["rope_theta"] if own == "rope_theta" else getattr(config, own)
        if fields.get(name) not in (None, used):
            stated, shown = ('rope_parameters: {"rope_type": "default", "rope_theta": …}' if own == "rope_theta" else own), _shown(fields[name])
            raise Unsupported(f"config.json: {name} is {shown}, but transformers' {family} does not read it, and uses {_shown(used)}; state {stated} with {shown}")
    for name, only in _FIXED.get(family, {}).items():
        if name in fields and fields[name] not in (None, only):
            raise Unsupported(f"config.json: {name} must be {_shown(only)}, as transformers' {family} computes; got {_shown(fields[name])}: give another checkpoint")
    _check_rotations(config)
    longest = fields.get("n_positions") if family == "nomic_bert" else None
    if isinstance(longest, int) and longest > config.max_position_embeddings:
        warnings.warn(
            f"config.json: n_positions is {longest}, which transformers' {family} does not read: texts are cut after {config.max_position_embeddings} "
            "tokens; max_position_embeddings states more",
            CheckpointWarning, stacklevel=3,
        )  # fmt: skip


def _check_rotations(config: Any) -> None:
    """Raise Unsupported for a scaling of rotary positions that transformers does not have, such as GTE's own `ntk`, and for no base."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = getattr(config, "rope_parameters", None) or {}
    # ModernBERT states them for each kind of layer.
    for each in stated.values() if all(isinstance(value, dict) for value in stated.values()) else [stated]:
        known = ("default", *ROPE_INIT_FUNCTIONS)
        if (kind := each.get("rope_type", "default")) not in known:
            raise Unsupported(f"config.json: the rope_type of rope_parameters must be one of {', '.join(known)}, which transformers has; got {_shown(kind)}: give another checkpoint")
        theta = each.get("rope_theta", 1.0)
        if not isinstance(theta, int | float) or not theta > 0:
            raise Unsupported(f"config.json: rope_theta of rope_parameters must be a number above 0; got {_shown(theta)}: state it, for ModernBERT as global_rope_theta and local_rope_theta")


def _shown(value: Any) -> str:
    return plain(ascii(value))[:60]
