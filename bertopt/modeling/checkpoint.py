"""A checkpoint directory to `Eager`, safely: safetensors only, no remote code, nothing freshly initialised."""

from __future__ import annotations

import contextlib
import inspect
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from bertopt.core import Eager, Spec, Task
from bertopt.errors import IntegrityError, Unsupported, UsageError
from bertopt.modeling.config_checks import OFFSET_POSITIONS, check_config
from bertopt.modeling.network import Network
from bertopt.modeling.source import read_json, resolve, scrub, weight_files
from bertopt.modeling.tokenizer import check_tokenizer, open_tokenizer

#: Files beside the weights that say how to use them; copied into every stage where present.
COMPANIONS = (
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json", "special_tokens_map.json",
    "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model", "added_tokens.json",
)  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings for a while: bertopt states what it finds itself."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load(source: str | Path, task: str = "auto", revision: str | None = None) -> Eager:
    """The checkpoint at `source` (hub id, directory or `pkg://package/path`) as an fp32 eager model.

    Raises UsageError (not a checkpoint, unknown task), Unsupported (family, pooling) and IntegrityError (weights
    that are unsafe, missing, not finite or do not fit), each naming the tensor or field.
    """
    return open_directory(resolve(str(source), revision), task)


def open_directory(directory: Path, task: str = "auto", rewrites_spec: Spec | None = None) -> Eager:
    """Like `load` for a local directory. `rewrites_spec`, a stage's recorded spec, skips what was checked before."""
    config = _config(directory)
    weight_files(directory)
    if rewrites_spec is None:
        pooling, normalize, st_length = _sentence_transformers(directory)
        task = _task(config, task, pooling)
    else:
        pooling, normalize, task = rewrites_spec.pooling, rewrites_spec.normalize, rewrites_spec.task
    with quiet():
        encoder = _encoder(directory, config, task)
        if rewrites_spec is None:
            _check_finite(encoder)
            tokenizer = open_tokenizer(directory)
            check_tokenizer(tokenizer, encoder)
            limit = min(filter(None, [st_length, int(tokenizer.model_max_length)]))
            spec = _spec(config, task, encoder, tokenizer.pad_token_id, limit, pooling, normalize)
        else:
            spec = rewrites_spec
    network = Network(encoder, spec).eval().requires_grad_(False)
    return Eager(spec, "float32", checkpoint=directory, network=network)


def write_snapshot(model: Eager, out: Path) -> None:
    """Copy what makes up the checkpoint to `out`: scrubbed configuration, safetensors, and the tokenizer as the one
    `tokenizer.json` that transformers would use."""
    import json

    source = model.checkpoint
    for path in weight_files(source):
        shutil.copyfile(path, out / path.name)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    if (source / "1_Pooling" / "config.json").is_file():
        (out / "1_Pooling").mkdir()
        shutil.copyfile(source / "1_Pooling" / "config.json", out / "1_Pooling" / "config.json")
    for name in ("config.json", "tokenizer_config.json"):
        if (source / name).is_file():
            fields, _ = scrub(read_json(source / name))
            (out / name).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")
    with quiet():
        backend = open_tokenizer(source).backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(out / "tokenizer.json"))


def _config(directory: Path) -> Any:
    from transformers import AutoConfig

    path = directory / "config.json"
    if not path.is_file():
        raise UsageError(f"'{directory}' has no config.json; give the directory of a transformers checkpoint")
    fields, dropped = scrub(read_json(path))
    check_config(fields)
    if dropped:
        warnings.warn(f"config.json: dropped {', '.join(sorted(set(dropped)))}: names code to run", stacklevel=2)
    return AutoConfig.for_model(fields["model_type"], **{key: value for key, value in fields.items() if key != "model_type"})


def _task(config: Any, task: str, pooling: str | None) -> Task:
    from optimum.exporters.tasks import TasksManager

    known = get_args(Task)
    if task == "auto":
        if pooling is not None:
            return "feature-extraction"
        import transformers

        architecture = (config.architectures or ["?"])[0]
        cls = getattr(transformers, architecture, None)
        try:
            task = TasksManager.infer_task_from_model(cls) if isinstance(cls, type) else "?"
        except ValueError:
            task = "?"
        if task not in known:
            raise UsageError(
                f"task: auto finds no task for architecture '{architecture}'; state one of {', '.join(known)}"
            )
    found = TasksManager.map_from_synonym(task)
    if found not in known:
        raise UsageError(f"task must be one of {', '.join(known)}; got '{task}'")
    return found  # type: ignore[no-any-return]


def _sentence_transformers(directory: Path) -> tuple[Any, bool, int | None]:
    """(pooling, normalize, max_seq_length) of a sentence-transformers directory, else (None, False, None)."""
    if not (directory / "modules.json").is_file():
        return None, False, None
    pooling, normalize = None, False
    for module in read_json(directory / "modules.json"):
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling_mode(read_json(directory / module["path"] / "config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer" or module["path"] not in ("", "."):
            raise Unsupported(
                f"modules.json: module '{kind}' at '{module['path']}' is none of Transformer, Pooling, Normalize"
            )
    length = None
    if (directory / "sentence_bert_config.json").is_file():
        length = read_json(directory / "sentence_bert_config.json").get("max_seq_length")
    return pooling, normalize, length


def _pooling_mode(fields: dict[str, Any]) -> str:
    short = {
        "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len",
        "cls": "cls", "mean": "mean", "max": "max", "mean_sqrt_len": "mean_sqrt_len",
    }  # fmt: skip
    mode = fields.get("pooling_mode")
    on = [
        key.removeprefix("pooling_mode_") for key, value in fields.items() if key.startswith("pooling_mode_") and value
    ]
    modes = [mode] if isinstance(mode, str) else (mode or on or ["mean"])
    if len(modes) != 1 or modes[0] not in short:
        raise Unsupported(f"1_Pooling: mode must be one of cls, mean, max, mean_sqrt_len; got {', '.join(modes)}")
    return short[modes[0]]


def _encoder(directory: Path, config: Any, task: Task) -> Any:
    from optimum.exporters.tasks import TasksManager
    from safetensors import SafetensorError

    auto = TasksManager.get_model_class_for_task(task, model_type=config.model_type)
    extra = {}
    if task == "feature-extraction":
        cls = auto._model_mapping[type(config)]
        if "add_pooling_layer" in inspect.signature(cls.__init__).parameters:
            # Not used, and often missing from the checkpoint.
            extra["add_pooling_layer"] = False
    try:
        encoder, info = auto.from_pretrained(
            directory, config=config, dtype=torch.float32, attn_implementation="eager", use_safetensors=True,
            local_files_only=True, trust_remote_code=False, ignore_mismatched_sizes=True, output_loading_info=True,
            **extra,
        )  # fmt: skip
    except SafetensorError as error:
        raise IntegrityError(f"model.safetensors is damaged ({error}); fetch the checkpoint again") from error
    problems = [
        f"tensor '{name}' has shape {list(found)} in the checkpoint, {list(expected)} by config.json"
        for name, found, expected in info["mismatched_keys"]
    ]
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    problems += [
        f"tensor '{name}' is missing from the checkpoint and would be freshly initialised"
        for name in sorted(set(info["missing_keys"]) - mismatched)
    ]
    prefix = encoder.base_model_prefix + "."
    unused = (name.removeprefix(prefix) for name in sorted(info["unexpected_keys"]))
    problems += [
        f"tensor '{name}' is in the checkpoint but not in the model of config.json"
        for name in unused
        if name.split(".")[0] in ("encoder", "embeddings", "transformer", "layers") and "position_ids" not in name
    ]
    if problems:
        raise IntegrityError(
            "weights and configuration must fit each other; " + "; ".join(problems[:5])
            + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            + f"; task is '{task}': state the task the checkpoint was trained for, or restore the checkpoint"
        )  # fmt: skip
    return encoder


def _check_finite(encoder: Any) -> None:
    for name, tensor in encoder.named_parameters():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise IntegrityError(
                f"tensor '{name}' must be finite; got {bad} NaN or infinite values; restore the checkpoint"
            )


def _spec(config: Any, task: Task, encoder: Any, pad_id: int, limit: int, pooling: Any, normalize: bool) -> Spec:
    from optimum.utils.normalized_config import NormalizedConfigManager, NormalizedTextConfig

    known = config.model_type in NormalizedConfigManager._conf
    normal = (
        NormalizedConfigManager.get_normalized_config_class(config.model_type) if known else NormalizedTextConfig
    )(config)
    usable = int(config.max_position_embeddings)
    if config.model_type in OFFSET_POSITIONS:
        # MPNet's padding index is 1 whatever the configuration says.
        usable -= int(encoder.base_model.embeddings.padding_idx) + 1
    accepted = inspect.signature(encoder.forward).parameters
    types = int(getattr(config, "type_vocab_size", 0) or 0)
    with_types = types > 1 and "token_type_ids" in accepted
    outputs = {
        "feature-extraction": ("sentence_embedding",) if pooling else ("last_hidden_state",),
        "question-answering": ("start_logits", "end_logits"),
    }.get(task, ("logits",))
    classes = task in ("text-classification", "token-classification")
    return Spec(
        family=config.model_type, task=task,
        inputs=("input_ids", "attention_mask", *(["token_type_ids"] if with_types else [])), outputs=outputs,
        layers=normal.num_layers, heads=normal.num_attention_heads, hidden=normal.hidden_size,
        vocabulary=normal.vocab_size, token_types=types if with_types else 0, pad_id=pad_id,
        max_length=usable, text_length=min(usable, limit), pooling=pooling, normalize=normalize,
        labels=tuple(config.id2label[i] for i in sorted(config.id2label)) if classes else (),
        multi_label=config.problem_type == "multi_label_classification", regression=config.problem_type == "regression",
        parameters=sum(p.numel() for p in encoder.parameters()),
        shift_free=_shift_free(config, task, encoder, pad_id, pooling), **_positions(config, encoder),
    )  # fmt: skip


def _positions(config: Any, encoder: Any) -> dict[str, Any]:
    """`positions` and `position_offset` of `Spec`."""
    if config.model_type in OFFSET_POSITIONS:
        return {"positions": "counted", "position_offset": int(encoder.base_model.embeddings.padding_idx) + 1}
    relative = config.model_type == "modernbert" or not getattr(config, "position_biased_input", True)
    return {"positions": "none" if relative else "column"}


def _shift_free(config: Any, task: Task, encoder: Any, pad_id: int, pooling: str | None) -> bool:
    """See `Spec.shift_free`."""
    first_column = pooling == "cls" or (
        task == "text-classification" and getattr(config, "classifier_pooling", "cls") == "cls"
    )
    if first_column:
        return False
    if config.model_type in OFFSET_POSITIONS:
        # Positions are counted over the ids that are not the embedding's padding index, which is MPNet's own.
        return int(encoder.base_model.embeddings.padding_idx) == pad_id
    if config.model_type == "deberta-v2":
        return bool(config.relative_attention and not config.position_biased_input)
    return bool(config.model_type == "modernbert")
