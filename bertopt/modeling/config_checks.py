"""Check a checkpoint's configuration before transformers sees it: its family, and that every size is sane."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import families
from bertopt.spec import Spec

_HIDDEN, _LAYERS, _HEADS = ("hidden_size", "dim"), ("num_hidden_layers", "n_layers"), ("num_attention_heads", "n_heads")
_INTERMEDIATE = ("intermediate_size", "hidden_dim")
#: The least and the most that each size may be. The largest published encoders stay far below.
_BOUNDS: dict[str, tuple[int, int]] = {
    **dict.fromkeys(_HIDDEN, (1, 65_536)), **dict.fromkeys(_LAYERS, (1, 1_000)), **dict.fromkeys(_HEADS, (1, 4_096)),
    **dict.fromkeys(_INTERMEDIATE, (1, 1_000_000)), "embedding_size": (1, 65_536),
    "input_embedding_size": (1, 65_536), "output_embedding_size": (1, 65_536), "vocab_size": (1, 10_000_000),
    "max_position_embeddings": (1, 10_000_000), "type_vocab_size": (0, 100_000), "task_type_vocab_size": (1, 100_000), "num_labels": (1, 100_000),
    "num_hidden_groups": (1, 1_000), "inner_group_num": (1, 1_000),
    "global_attn_every_n_layers": (1, 1_000),
    "num_key_value_heads": (1, 4_096), "prediction_head_size": (1, 65_536),
    "intra_bottleneck_size": (1, 65_536), "num_feedforward_networks": (1, 100),
    "head_ratio": (1, 4_096), "conv_kernel_size": (1, 1_001), "num_groups": (1, 4_096),
    **dict.fromkeys(("q_groups", "k_groups", "v_groups", "post_attention_groups", "intermediate_groups", "output_groups"), (1, 65_536)),
    # transformers' MPNet reads 32 whatever is stated, and its table has no more rows than stated.
    "relative_attention_num_buckets": (32, 1_000_000),
    "max_relative_positions": (-1, 10_000_000),
}  # fmt: skip
#: Fields that transformers takes to be absent when they are null.
_NULLABLE = ("num_key_value_heads", "num_labels", "type_vocab_size", "pad_token_id", "id2label", "label2id")
_MAX_LABELS = 100_000
#: What the names of transformers' classes end in, by task.
_HEAD_TASKS = {
    "ForSequenceClassification": "text-classification", "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering", "ForMaskedLM": "fill-mask",
}  # fmt: skip


def check_config(fields: Any) -> dict[str, Any]:
    """Return `fields`, the content of config.json, if bertopt can work with it.

    Raises UsageError for a model that is no BERT-family encoder, IntegrityError (with every problem) for a damaged one.
    """
    if not isinstance(fields, dict):
        raise IntegrityError(f"config.json must be a JSON object; got {_shown(fields)}; restore the checkpoint")
    _check_family(fields)
    problems = [*_sizes(fields), *_labels(fields), *(_of_esm(fields) if fields["model_type"] == "esm" else [])]
    hidden, heads = (_first(fields, names) for names in (_HIDDEN, _HEADS))
    if not problems and hidden and heads and hidden % heads:
        problems.append(f"hidden size must be a multiple of the number of attention heads; got {hidden} and {heads}")
    if not problems:
        problems += _convolutions(fields)
    if problems:
        raise IntegrityError(f"config.json: {'; '.join(problems[:5])}; restore the checkpoint")
    return fields


def check_size(fields: Mapping[str, Any], weight_bytes: int) -> None:
    """Raise IntegrityError if config.json describes a network far larger than its weight files.

    Building such a network would use up memory and time before anything compares the two.
    """
    hidden, layers, vocabulary = (_first(fields, names) or 0 for names in (_HIDDEN, _LAYERS, ("vocab_size",)))
    if fields["model_type"] == "albert":
        layers = int(fields.get("num_hidden_groups", 1)) * int(fields.get("inner_group_num", 1))
    intermediate = _first(fields, _INTERMEDIATE) or 0
    embedding = int(fields.get("input_embedding_size" if fields["model_type"] == "rembert" else "embedding_size") or hidden)
    positions = int(fields.get("max_position_embeddings") or 0)
    rows = vocabulary + (0 if families.is_rotary(fields) else positions)
    if fields["model_type"] == "deberta" and fields.get("relative_attention"):
        # A row for each distance, before and behind.
        distances = int(fields.get("max_relative_positions", -1))
        rows += 2 * (distances if distances > 0 else positions)
    parameters = rows * embedding + layers * (3 * hidden * hidden + hidden * intermediate)
    # A parameter takes one byte at least. Half as a margin: some families share or leave out a few matrices.
    if parameters > 2 * weight_bytes + 1_000_000:
        raise IntegrityError(
            f"config.json describes about {parameters:,} parameters, but the weight files have {weight_bytes:,} bytes; "
            "restore the checkpoint"
        )


def usable_positions(fields: Mapping[str, Any]) -> int | None:
    """The longest sequence that the model's positions allow, or None where config.json does not say."""
    positions = fields.get("max_position_embeddings")
    if positions is None:
        return None
    if fields["model_type"] == "mpnet":
        # MPNet's padding index is 1 whatever the configuration says.
        return int(positions) - 2
    if families.counts_positions(fields):
        padding = fields.get("pad_token_id", 1)
        return None if padding is None else int(positions) - int(padding) - 1
    return int(positions)


def cut_shapes(fields: Mapping[str, Any], shapes: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return `shapes` [B, S] with sequences cut to the model's usable positions, each once."""
    usable = usable_positions(fields)
    return tuple(dict.fromkeys((batch, min(sequence, usable or sequence)) for batch, sequence in shapes))


def check_shapes(fields: Mapping[str, Any], shapes: Sequence[tuple[int, int]]) -> None:
    """Raise UsageError where a sequence of `shapes` [B, S] is longer than the model's usable positions."""
    usable = usable_positions(fields)
    too_long = next((shape for shape in shapes if usable is not None and shape[1] > usable), None)
    if usable is not None and too_long is not None:
        raise UsageError(
            f"inputs.shapes: sequence must be at most the model's {usable} usable positions; got {list(too_long)}; "
            f"state shapes that fit, such as [[1, {min(16, usable)}], [8, {usable}]]"
        )


def architecture(fields: Mapping[str, Any]) -> str:
    """Return the name of transformers' class that the checkpoint was saved from, empty where config.json has none."""
    named = fields.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def head_task(name: str) -> str | None:
    """Return the task of an architecture's head; None for one without a head."""
    return next((task for head, task in _HEAD_TASKS.items() if name.endswith(head)), None)


def labelling(fields: Mapping[str, Any], task: str) -> Spec | None:
    """What config.json alone tells of the labels that texts may have: `task` (`auto`: from the architecture), `labels` and the kind of
    problem are the only fields set. None where it tells no task."""
    found = task if task != "auto" else head_task(architecture(fields))
    if found is None:
        return None
    # As transformers names classes that have no names.
    names = fields.get("id2label") or {number: f"LABEL_{number}" for number in range(fields.get("num_labels") or 2)}
    problem = fields.get("problem_type")
    told: dict[str, Any] = {
        "task": found, "labels": tuple(map(str, names.values())) if found in ("text-classification", "token-classification") else (),
        "multi_label": problem == "multi_label_classification", "regression": problem == "regression",
    }  # fmt: skip
    return Spec.model_construct(**told)


def _check_family(fields: Mapping[str, Any]) -> None:
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in families.FAMILIES:
        raise UsageError(
            f"model_type must be one of {', '.join(families.FAMILIES)}; got {_shown(family)}: bertopt is for BERT-family encoders, "
            "so give another checkpoint"
        )
    if fields.get("is_decoder") or fields.get("add_cross_attention"):
        raise UsageError("config.json says is_decoder or add_cross_attention: bertopt is for encoders only")
    if fields.get("quantization_config"):
        raise UsageError("config.json has a quantization_config: give bertopt the full-precision checkpoint instead")
    if fields.get("is_folding_model"):
        raise UsageError("config.json says is_folding_model: ESMFold gives structures, and bertopt runs encoders only; give an ESM-2 checkpoint, such as facebook/esm2_t33_650M_UR50D")
    if named := fields.get("transformers_weights"):
        raise UsageError(f"config.json has transformers_weights: rename {_shown(named)} model.safetensors and take the field out, so that all read the same weights")


def _sizes(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    for name, (least, most) in _BOUNDS.items():
        value = fields.get(name, least)
        if value is None and name in _NULLABLE:
            continue
        if not _is_int(value) or not least <= value <= most:
            problems.append(f"{name} must be a whole number from {least} to {most:,}; got {_shown(value)}")
    for name in ("layer_norm_eps", "norm_eps", "rms_norm_eps"):
        value = fields.get(name, 1e-12)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            problems.append(f"{name} must be a finite number of at least 0; got {_shown(value)}")
    if fields.get("model_type") == "ernie" and not isinstance(fields.get("use_task_id", False), bool):
        problems.append(f"use_task_id must be true or false; got {_shown(fields['use_task_id'])}")
    padding, vocabulary = fields.get("pad_token_id"), fields.get("vocab_size")
    if padding is not None and (not _is_int(padding) or (_is_int(vocabulary) and padding >= vocabulary)):
        problems.append(f"pad_token_id must be a whole number below vocab_size; got {_shown(padding)}")
    if families.of(fields).positions == "counted" and fields["model_type"] != "mpnet" and fields.get("pad_token_id", 1) is None:
        problems.append("pad_token_id must be a whole number, from which positions are counted; got None")
    return problems


def _of_esm(fields: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields that transformers' ESM has no defaults for."""
    needed = ["vocab_size", "pad_token_id", *(["mask_token_id"] if fields.get("token_dropout") else [])]
    problems = [f"{name} must be stated for {fields['model_type']}" for name in needed if fields.get(name) is None]
    mask, vocabulary = fields.get("mask_token_id"), fields.get("vocab_size")
    if mask is not None and not (_is_int(mask) and mask >= 0 and _is_int(vocabulary) and mask < vocabulary):
        problems.append(f"mask_token_id must be a whole number below vocab_size; got {_shown(mask)}")
    theta = fields.get("rope_theta", 10_000.0)
    if not isinstance(theta, int | float) or isinstance(theta, bool) or not 0 < theta < math.inf:
        problems.append(f"rope_theta must be a finite number above 0; got {_shown(theta)}")
    return problems


#: SqueezeBERT's counts of groups, and whether each divides the intermediate size too.
_GROUPS = {
    "q_groups": False, "k_groups": False, "v_groups": False, "post_attention_groups": False, "intermediate_groups": True, "output_groups": True,
}  # fmt: skip


def _convolutions(fields: Mapping[str, Any]) -> list[str]:
    """What does not fit in a network with bottlenecks or convolutions whose sizes are sane each by itself."""
    family, hidden = fields["model_type"], fields.get("hidden_size")
    heads = fields.get("num_attention_heads", 4 if family == "mobilebert" else 12)
    problems = []
    if family == "mobilebert" and fields.get("use_bottleneck", True):
        inner = fields.get("intra_bottleneck_size", 128)
        if inner % heads:
            problems.append(f"intra_bottleneck_size must be a multiple of the number of attention heads; got {inner} and {heads}")
        shared = fields.get("use_bottleneck_attention", False) or fields.get("key_query_shared_bottleneck", True)
        if not shared and inner != (hidden or 512):
            problems.append("use_bottleneck_attention or key_query_shared_bottleneck must be true, as transformers' layers have no other input for the query; both are false")
    if family == "convbert":
        ratio, kernel, groups = fields.get("head_ratio", 2), fields.get("conv_kernel_size", 9), fields.get("num_groups", 1)
        # As transformers counts them: half of each head's channels attend, the others are convolutions.
        if (hidden or 768) % (2 * max(1, heads // ratio)):
            problems.append(f"hidden size must be a multiple of twice num_attention_heads / head_ratio; got {hidden}, {heads} and {ratio}")
        if kernel % 2 == 0:
            problems.append(f"conv_kernel_size must be odd, so that a token is in the middle; got {kernel}")
        if any(fields.get(name, groups) % groups for name in ("hidden_size", "intermediate_size")):
            problems.append(f"hidden and intermediate size must be multiples of num_groups; got {groups}")
    if family == "squeezebert":
        if fields.get("embedding_size", 768) != (hidden or 768):
            problems.append(f"embedding_size must be the hidden size, as transformers' network has no layer between; got {fields.get('embedding_size', 768)} and {hidden}")
        for name, wide in _GROUPS.items():
            groups = fields.get(name, 1)
            if any(fields.get(size, groups) % groups for size in ("hidden_size", *(["intermediate_size"] if wide else []))):
                problems.append(f"{name} must divide the sizes of its layer; got {groups}")
    return problems


def _labels(fields: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("id2label", "label2id"):
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, dict):
            problems.append(f"{name} must be a JSON object; got {_shown(value)}")
        elif len(value) > _MAX_LABELS:
            problems.append(f"{name} may have at most {_MAX_LABELS:,} labels; got {len(value):,}")
        elif name == "id2label" and not all(str(key).isdecimal() and len(str(key)) <= 6 for key in value):
            problems.append(f"id2label must map class numbers to names; got {_shown(value)}")
    return problems


def _first(fields: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((fields[name] for name in names if name in fields), None)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    """A value of a foreign file, shortened, with nothing that a terminal would act on."""
    if isinstance(value, dict | list):
        return f"a JSON {'object' if isinstance(value, dict) else 'list'}"
    text = "a number of many digits" if _is_int(value) and abs(value) >= 10**40 else ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
