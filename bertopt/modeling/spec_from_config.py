"""What a checkpoint's configuration says of the model: task, pooling, and everything in `Spec`."""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

from bertopt.core import Spec, Task
from bertopt.errors import CheckpointWarning, IntegrityError, UsageError
from bertopt.modeling.families import classifier_pooling, counts_positions, is_rotary
from bertopt.modeling.sentence_transformers import Modules
from bertopt.system.untrusted import plain


def find_task(config: Any, task: str, pooling: str | None) -> Task:
    """Return the task: the stated one, or for `auto` that of config.json's architecture.

    Raises UsageError where config.json names a head for another task: its tensors may fit all the same.
    """
    from optimum.exporters.tasks import TasksManager

    known = get_args(Task)
    architecture = str((config.architectures or ["?"])[0])
    trained = _trained_for(architecture)
    if task == "auto":
        if pooling is not None:
            return "feature-extraction"
        if trained not in known:
            raise UsageError(
                f"task: auto finds no task for architecture '{architecture}'; state one of {', '.join(known)}"
            )
        return trained  # type: ignore[return-value]
    found = TasksManager.map_from_synonym(task)
    if found not in known:
        raise UsageError(f"task must be one of {', '.join(known)}; got '{task}'")
    # Every checkpoint gives features, and a bare encoder's name says nothing of a head.
    if trained in known and trained not in (found, "feature-extraction") and found != "feature-extraction":
        raise UsageError(
            f"the checkpoint was trained for {trained} (config.json: {architecture}); got task: {found}; "
            f"state {trained}, feature-extraction or auto"
        )
    return found  # type: ignore[no-any-return]


def _trained_for(architecture: str) -> str:
    """Return the task of a class of transformers, or `?`."""
    import transformers
    from optimum.exporters.tasks import TasksManager

    cls = getattr(transformers, architecture, None)
    try:
        return str(TasksManager.infer_task_from_model(cls)) if isinstance(cls, type) else "?"
    except ValueError:
        return "?"


def make_spec(config: Any, task: Task, encoder: Any, pad_id: int, limit: int, modules: Modules) -> Spec:
    from optimum.utils.normalized_config import NormalizedConfigManager, NormalizedTextConfig

    known = config.model_type in NormalizedConfigManager._conf
    normal = (
        NormalizedConfigManager.get_normalized_config_class(config.model_type) if known else NormalizedTextConfig
    )(config)
    usable = int(config.max_position_embeddings)
    if counts_positions(config):
        # MPNet's padding index is 1 whatever the configuration says.
        usable -= int(encoder.base_model.embeddings.padding_idx) + 1
    accepted = inspect.signature(encoder.forward).parameters
    types = int(getattr(config, "type_vocab_size", 0) or 0)
    with_types = types > 1 and "token_type_ids" in accepted
    outputs = {
        "feature-extraction": ("sentence_embedding",) if modules.pooling else ("last_hidden_state",),
        "question-answering": ("start_logits", "end_logits"),
    }.get(task, ("logits",))
    classes = task in ("text-classification", "token-classification")
    return Spec(
        family=config.model_type, task=task,
        inputs=("input_ids", "attention_mask", *(["token_type_ids"] if with_types else [])), outputs=outputs,
        # ALBERT may run several inner layers for each that it counts.
        layers=normal.num_layers * int(getattr(config, "inner_group_num", 1)), heads=_heads(config, normal), hidden=normal.hidden_size,
        vocabulary=normal.vocab_size, token_types=types if with_types else 0, pad_id=pad_id,
        max_length=usable, text_length=min(usable, limit), pooling=modules.pooling, dense=modules.dense, normalize=modules.normalize,
        labels=_labels(config.id2label) if classes else (),
        multi_label=config.problem_type == "multi_label_classification", regression=config.problem_type == "regression",
        dropped_id=int(config.mask_token_id) if getattr(config, "token_dropout", False) else None,
        parameters=sum(p.numel() for p in encoder.parameters()),
        left_padding_invariant=_left_padding_invariant(config, task, encoder, pad_id, modules.pooling), **_positions(config, encoder),
    )  # fmt: skip


def _labels(names: Mapping[int, Any]) -> tuple[str, ...]:
    """The classes' names in their order. Numbers are written out: checkpoints have them where the classes of a data set were numbers."""
    if sorted(names) != list(range(len(names))):
        raise IntegrityError(f"config.json: id2label must name the classes 0 to {len(names) - 1}; got {sorted(names)[:8]}; restore the checkpoint")
    unnamed = next((number for number, name in sorted(names.items()) if not isinstance(name, str | int | float)), None)
    if unnamed is not None:
        shown = plain(ascii(names[unnamed]))[:60]
        raise IntegrityError(f"config.json: id2label must give each class a text or a number; class {unnamed} has {shown}: name it")
    labels = tuple(str(name) for _, name in sorted(names.items()))
    again = [label for label, count in Counter(labels).items() if count > 1]
    if again:
        shown = ", ".join(plain(ascii(label))[:60] for label in again[:3])
        warnings.warn(f"config.json: id2label names several classes {shown}: answers do not tell them apart, and labels of texts mean the first of them", CheckpointWarning, stacklevel=2)
    return labels


def _heads(config: Any, normal: Any) -> int:
    """Heads that attend: ConvBERT's convolutions take the place of the others."""
    heads = int(normal.num_attention_heads)
    return max(1, heads // int(config.head_ratio)) if config.model_type == "convbert" else heads


def _positions(config: Any, encoder: Any) -> dict[str, Any]:
    """`positions` and `position_offset` of `Spec`."""
    if counts_positions(config):
        return {"positions": "counted", "position_offset": int(encoder.base_model.embeddings.padding_idx) + 1}
    relative = _turns_no_values(config) or not getattr(config, "position_biased_input", True)
    return {"positions": "none" if relative else "column"}


def _left_padding_invariant(config: Any, task: Task, encoder: Any, pad_id: int, pooling: str | None) -> bool:
    """See `Spec.left_padding_invariant`."""
    if pooling == "cls" or (task == "text-classification" and classifier_pooling(config) in ("cls", "bos")):
        return False
    if counts_positions(config):
        # Positions are counted over the ids that are not the embedding's padding index, which is MPNet's own.
        return int(encoder.base_model.embeddings.padding_idx) == pad_id
    if config.model_type in ("deberta", "deberta-v2"):
        return bool(config.relative_attention and not config.position_biased_input)
    return _turns_no_values(config)


def _turns_no_values(config: Any) -> bool:
    """Whether positions turn queries and keys alone, so that only distances matter. RoFormer may turn values too, which makes them absolute."""
    return is_rotary(config) and not getattr(config, "rotary_value", False)
