"""Fields of config.json that a checkpoint's own code used, but transformers' class of the same family ignores in favour of its defaults.

There are many copies of such checkpoints of families that first came with their own code; their tensors fit either way.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported
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
    "roformer": {"norm_type": "layer_norm", "use_bias": True, "attention_scale": True},
    "gte": {"logn_attention_scale": False, "layer_norm_type": "layer_norm", "position_embedding_type": "rope"},
    "esm": {"hidden_act": "gelu", "add_bias_fnn": True, "rope_scaling": None},
    # Of deberta-v2, whose weights may fit.
    "deberta": {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none", "conv_kernel_size": 0},
}  # fmt: skip
#: UltraBERT's kinds of layers, and what to state instead of lists by layer.
_KINDS = {"full_attention", "sliding_attention"}
_BY_KIND = "state layer_types, sliding_window and rope_parameters by kind of layer"


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
    if family == "esm" and config.position_embedding_type not in ("absolute", "rotary"):
        raise Unsupported(
            f"config.json: position_embedding_type must be absolute or rotary; got {_shown(config.position_embedding_type)}, without which "
            "transformers' esm has no positions: give another checkpoint"
        )
    _check_rotations(config)
    longest = fields.get("n_positions") if family == "nomic_bert" else None
    if isinstance(longest, int) and longest > config.max_position_embeddings:
        warnings.warn(
            f"config.json: n_positions is {longest}, which transformers' {family} does not read: texts are cut after {config.max_position_embeddings} "
            "tokens; max_position_embeddings states more",
            CheckpointWarning, stacklevel=3,
        )  # fmt: skip


def check_by_layer(fields: Mapping[str, Any]) -> None:
    """Raise Unsupported where config.json (`fields`) states windows and rotary bases for each layer as UltraBERT's own code did, and
    transformers, which knows two kinds of layers, would make other ones of them; IntegrityError for a window that is none.
    """
    if fields["model_type"] != "ultrabert":
        return
    windows, bases, layers = (fields.get(name) for name in ("attention_windows", "rope_theta", "num_hidden_layers"))
    for name, value in (("attention_windows", windows), ("rope_theta", bases)):
        if value is not None and (not isinstance(value, list) or len(value) != layers):
            raise Unsupported(f"config.json: {name} must be a list with an entry for each of {_shown(layers)} layers, as transformers' ultrabert reads it; got {_shown(value)}: {_BY_KIND}")
    for window in (fields.get("sliding_window", 1), *filter(None, windows or ())):
        if not isinstance(window, int) or isinstance(window, bool) or window < 1:
            raise IntegrityError(f"config.json: sliding_window and attention_windows must be whole numbers of at least 1; got {_shown(window)}; restore the checkpoint")
    if windows is not None:
        _check_windows(fields, windows)
    if bases is not None:
        _check_bases(fields, bases)


def _check_windows(fields: Mapping[str, Any], windows: Sequence[Any]) -> None:
    different = sorted({*filter(None, windows)})
    if len(different) > 1:
        raise Unsupported(f"config.json: attention_windows has several windows, {_shown(different)}, and transformers' ultrabert would use the first in all layers: give another checkpoint")
    for name, made in (("layer_types", _kinds_of(windows)), ("sliding_window", different[0] if different else None)):
        if made is not None and fields.get(name) not in (None, made):
            raise Unsupported(f"config.json: {name} and attention_windows contradict each other, {_shown(fields[name])} and {_shown(windows)}: take out the wrong one")


def _check_bases(fields: Mapping[str, Any], bases: Sequence[Any]) -> None:
    if fields.get("rope_parameters") is not None:
        raise Unsupported("config.json: of rope_theta and rope_parameters transformers' ultrabert reads the second alone: take out rope_theta")
    windows = fields.get("attention_windows")
    usual = _kinds_of([number % 3 for number in range(1, len(bases) + 1)] if windows is None else windows)
    by_kind: dict[str, set[str]] = {}
    for kind, base in zip(fields.get("layer_types") or usual, bases, strict=False):
        by_kind.setdefault(str(kind), set()).add(plain(str(base)))
    for kind, different in sorted(by_kind.items()):
        if len(different) > 1:
            raise Unsupported(f"config.json: rope_theta has several bases, {', '.join(sorted(different))[:60]}, for layers of {plain(kind)[:60]}, and transformers' ultrabert would use the last in all of them: give another checkpoint")


def _kinds_of(windows: Sequence[Any]) -> list[str]:
    return ["sliding_attention" if window else "full_attention" for window in windows]


def _check_rotations(config: Any) -> None:
    """Raise Unsupported for a scaling of rotary positions that transformers does not have, such as GTE's own `ntk`, and for no base."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stated = getattr(config, "rope_parameters", None) or {}
    if config.model_type == "ultrabert" and not set(config.layer_types) <= _KINDS:
        raise Unsupported(f"config.json: layer_types may be {' and '.join(sorted(_KINDS))}, which transformers' ultrabert has; got {_shown(sorted(set(config.layer_types) - _KINDS))}: give another checkpoint")
    if config.model_type == "ultrabert" and (without := sorted({kind for kind in config.layer_types if not isinstance(stated.get(kind), dict)})):
        raise Unsupported(f"config.json: rope_parameters must state a rope_type and rope_theta for each kind of layer; got none for {_shown(without[0])}: state them")
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
