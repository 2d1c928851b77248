"""Load a checkpoint as `Eager`, safely: only safetensors, no remote code, no newly initialised weights."""

from __future__ import annotations

import contextlib
import inspect
import json
import shutil
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from bertopt.core import Eager, Spec, Task
from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported, UsageError
from bertopt.modeling import dense, esm, neighbours, other_fields
from bertopt.modeling.checkpoint_files import read_json, weight_files
from bertopt.modeling.config_checks import check_config
from bertopt.modeling.modules_json import MODULES, module_files
from bertopt.modeling.network import Network
from bertopt.modeling.sentence_transformers import (
    PROMPTS,
    SETTINGS,
    Modules,
    check_length,
    read_sentence_transformers,
    warn_of_other_scores,
)
from bertopt.modeling.source import resolve, scrub
from bertopt.modeling.spec_from_config import find_task, make_spec
from bertopt.modeling.tokenizer import check_tokenizer, open_tokenizer, told, warn_of_two_separators
from bertopt.spec import SPLADE
from bertopt.system import environment
from bertopt.system.untrusted import plain

#: Integer tensors that older versions of transformers stored with the weights; no network needs them.
BUFFERS = ("position_ids", "token_type_ids")
#: RoFormer's sines and cosines, which transformers makes anew where a checkpoint lacks them.
_SINES = "encoder.embed_positions.weight"
#: Files beside the weights that say how to use them; they are copied into every stage.
COMPANIONS = (
    MODULES, *SETTINGS, PROMPTS, "special_tokens_map.json",
    "vocab.txt", "vocab.json", "merges.txt", "sentencepiece.bpe.model", "spiece.model", "spm.model", "added_tokens.json",
    "sentencepiece.model",
)  # fmt: skip


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and warnings inside the context: bertopt reports what matters itself."""
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


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Make tensors on the CPU inside the context unless code says otherwise, as torch does by itself.

    If a user's program has called `torch.set_default_device`, transformers would load weights there, or ask for `accelerate`.
    """
    cpu = torch.device("cpu")
    with cpu if torch.get_default_device() != cpu else contextlib.nullcontext():
        yield


def load(source: str | Path, task: str = "auto", revision: str | None = None) -> Eager:
    """Return the checkpoint at `source` (hub id, directory or `pkg://package/path`) as an fp32 eager model.

    Raises UsageError (not a checkpoint, unknown task), Unsupported (family, pooling) and IntegrityError (weights
    that are unsafe, missing, not finite or do not fit), each naming the tensor or field.
    """
    return open_directory(resolve(str(source), revision), task)


def open_directory(directory: Path, task: str = "auto") -> Eager:
    """Like `load` for a local directory."""
    config = _config(directory)
    weight_files(directory)
    modules = read_sentence_transformers(directory)
    task = find_task(config, task, modules.pooling)
    if task != "feature-extraction":
        modules = Modules(max_seq_length=modules.max_seq_length)
    with quiet():
        encoder = _encoder(directory, config, _head(task, modules.pooling))
        _check_dtypes(directory)
        _check_finite(encoder)
        tokenizer = open_tokenizer(directory)
        check_tokenizer(tokenizer, encoder)
        check_length("tokenizer_config.json: model_max_length", int(tokenizer.model_max_length))
        # In sentence-transformers its own setting replaces the tokenizer's, even with a larger one.
        limit = modules.max_seq_length or int(tokenizer.model_max_length)
        if task == "text-classification":
            warn_of_other_scores(config, directory)
        if config.model_type == "deberta" and task in ("text-classification", "question-answering"):
            warn_of_two_separators(tokenizer)
        spec = make_spec(config, task, encoder, tokenizer.pad_token_id, limit, modules)
        if tokenizer.padding_side == "left" and not spec.left_padding_invariant:
            warnings.warn(
                f"tokenizer_config.json: padding_side is left, so that other libraries' answers to a text of {spec.family} depend on the texts beside "
                "it, whose length shifts its positions; an artefact's are those of the text alone",
                CheckpointWarning, stacklevel=2,
            )  # fmt: skip
        if neighbours.reads_padding(config):
            warnings.warn(
                f"tokens of {spec.family} read those beside them, so that other libraries' answers to a text depend on the padding behind it; an "
                "artefact's are those of the text alone",
                CheckpointWarning, stacklevel=2,
            )  # fmt: skip
    after_pooling = dense.load(directory, spec.dense, spec.hidden)
    if after_pooling is not None:
        spec = spec.model_copy(update={"parameters": spec.parameters + sum(p.numel() for p in after_pooling.parameters())})
    return _eager(directory, spec, encoder, after_pooling)


def reopen(directory: Path, spec: Spec) -> Eager:
    """Open a stage's copy of a checkpoint, which was checked when its `spec` was recorded."""
    config = _config(directory)
    weight_files(directory)
    with quiet():
        encoder = _encoder(directory, config, _head(spec.task, spec.pooling))
    return _eager(directory, spec, encoder, dense.load(directory, spec.dense, spec.hidden))


def _eager(directory: Path, spec: Spec, encoder: Any, after_pooling: dense.Dense | None) -> Eager:
    return Eager(spec, "float32", checkpoint=directory, network=Network(encoder, spec, after_pooling).eval().requires_grad_(False))


def write_snapshot(model: Eager, out: Path) -> None:
    """Copy what makes up the checkpoint to `out`: scrubbed configuration, safetensors, and the tokenizer as the one
    `tokenizer.json` that transformers would use, with what that leaves to transformers' class stated beside it."""
    source = model.checkpoint
    for path in weight_files(source):
        shutil.copyfile(path, out / path.name)
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)
    for name in module_files(source):
        (out / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, out / name)
    with quiet():
        tokenizer = open_tokenizer(source)
    for name, left_out in (("config.json", {}), ("tokenizer_config.json", told(tokenizer))):
        fields, _ = scrub(read_json(source / name)) if (source / name).is_file() else ({}, [])
        fields |= {key: value for key, value in left_out.items() if key not in fields}
        if fields:
            (out / name).write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", "utf-8")
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.save(str(out / "tokenizer.json"))


def _config(directory: Path) -> Any:
    environment.check_docstrings()
    environment.check_hub_variables()
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    path = directory / "config.json"
    if not path.is_file():
        raise UsageError(f"'{directory}' has no config.json; give the directory of a transformers checkpoint")
    fields, dropped = scrub(read_json(path))
    check_config(fields)
    if fields["model_type"] not in CONFIG_MAPPING:
        raise Unsupported(f"transformers {__version__} does not have {fields['model_type']}, which later versions have: pip install -U transformers")
    if dropped:
        warnings.warn(f"config.json: dropped {', '.join(sorted(set(dropped)))}: these can run code, and bertopt runs none", CheckpointWarning, stacklevel=2)
    # Networks are read by the names of their outputs, and run at every length: neither tuples nor chunks change a number.
    fields = {**fields, "return_dict": True, "chunk_size_feed_forward": 0}
    other_fields.check_by_layer(fields)
    config = AutoConfig.for_model(fields["model_type"], **{key: value for key, value in fields.items() if key != "model_type"})
    other_fields.check(fields, config)
    return config


def _head(task: Task, pooling: str | None) -> Task:
    """Return the task of transformers' class that has the weights: a SPLADE's embeddings come from a masked language model."""
    return "fill-mask" if pooling in SPLADE else task


def _encoder(directory: Path, config: Any, task: Task) -> Any:
    """Return transformers' model for the task, in float32, with the weights of the checkpoint. Raises as `load` does."""
    from optimum.exporters.tasks import TasksManager
    from safetensors import SafetensorError

    auto = TasksManager.get_model_class_for_task(task, model_type=config.model_type)
    extra = {}
    if type(config) not in auto._model_mapping:
        raise UsageError(f"transformers has no model of {config.model_type} for {task}; state another task")
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
    if config.model_type == "esm":
        # The first is not used, and often missing; the second follows from config.json.
        info["missing_keys"] = {name for name in info["missing_keys"] if "contact_head." not in name and not name.endswith("rotary_embeddings.inv_freq")}
    _check_fit(info, config, task, encoder.base_model_prefix)
    if config.model_type == "esm":
        esm.prepare(encoder)
    neighbours.prepare(encoder.base_model)
    return encoder


def _check_fit(info: Mapping[str, Any], config: Any, task: Task, prefix: str) -> None:
    """Raise where weights and configuration do not fit each other, by what transformers says of loading (`info`).

    IntegrityError names tensors of another shape, that are missing, or that are left, such as ERNIE's types of tasks; Unsupported one of relative
    positions, which the installed transformers ignores. `prefix` stands before the encoder's names in a model with a head.
    """
    relative = next((name for name in sorted(info["unexpected_keys"]) if name.endswith("attention.self.distance_embedding.weight")), None)
    if relative:
        raise Unsupported(
            f"the checkpoint has relative positions (position_embedding_type: {plain(str(getattr(config, 'position_embedding_type', 'relative_key')))}), and the installed "
            f"transformers would ignore tensor '{plain(relative)}'; give a checkpoint with absolute positions, or one of deberta-v2, mpnet and modernbert"
        )
    if tasks := next((name for name in sorted(info["unexpected_keys"]) if name.endswith("embeddings.task_type_embeddings.weight")), None):
        raise IntegrityError(
            f"the checkpoint has types of tasks (tensor '{plain(tasks)}'), which transformers adds to every token only where config.json has "
            "model_type 'ernie' and use_task_id true; state both"
        )
    wrapper = _wrapper(sorted(info["missing_keys"]), info["unexpected_keys"])
    if wrapper:
        raise IntegrityError(
            f"tensor names begin with '{plain(wrapper)}' in the checkpoint, as if the model were wrapped in another (DataParallel, "
            "torch.compile, Lightning); save the inner model with its save_pretrained"
        )
    if problems := _misfits(info, prefix):
        head = (found[0] for name, found, expected in info["mismatched_keys"] if not name.startswith(f"{prefix}.") and expected[0] == config.num_labels)
        classes = next(head, None) if task.endswith("classification") else None
        if task == "fill-mask" and any(name.startswith("lm_predictions.lm_head.") for name in info["unexpected_keys"]):
            raise IntegrityError('the head over the vocabulary is DeBERTa\'s own, lm_predictions, and config.json asks for another: it must have "legacy": false')
        raise IntegrityError(
            "weights and configuration must fit each other; " + "; ".join(problems[:5])
            + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            + (f"; config.json must have an id2label with {classes} names: its classes" if classes else
               f"; task is '{task}': state the task the checkpoint was trained for, or restore the checkpoint")
        )  # fmt: skip


def _misfits(info: Mapping[str, Any], prefix: str) -> list[str]:
    """Return what is wrong with each tensor that is of another shape, missing, or left over of an encoder."""
    mismatched = {name for name, *_ in info["mismatched_keys"]}
    left = (name.removeprefix(f"{prefix}.") for name in sorted(info["unexpected_keys"]) if not name.endswith(BUFFERS))
    return [
        *(f"tensor '{name}' has shape {list(found)} in the checkpoint, {list(expected)} by config.json" for name, found, expected in info["mismatched_keys"]),
        *(f"tensor '{name}' is missing from the checkpoint and would be freshly initialised" for name in sorted(set(info["missing_keys"]) - mismatched) if not name.endswith(_SINES)),
        *(f"tensor '{name}' is in the checkpoint but not in the model of config.json"
          for name in left if name.split(".")[0] in ("encoder", "embeddings", "embeddings_project", "transformer", "layers")),
    ]  # fmt: skip


def _wrapper(missing: list[str], unexpected: Collection[str]) -> str:
    """Return the prefix that all missing names have in the checkpoint; empty where there is none."""
    found = next((name.removesuffix(missing[0]) for name in sorted(unexpected) if name.endswith(f".{missing[0]}")), "") if missing else ""
    return found if all(found + name in unexpected for name in missing) else ""


def _check_dtypes(directory: Path) -> None:
    """Raise IntegrityError for weights stored as integers, which are not trained values."""
    from safetensors import safe_open

    for path in weight_files(directory):
        if path.suffix == ".json":
            continue
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  (no mapping)
                dtype = file.get_slice(name).get_dtype()
                if not dtype.startswith(("F", "BF")) and not name.endswith(BUFFERS):
                    raise IntegrityError(f"tensor '{plain(name)}' must hold floating-point numbers; got {dtype}; restore the checkpoint")


def _check_finite(encoder: Any) -> None:
    buffers = ((name, tensor) for name, tensor in encoder.named_buffers() if tensor.is_floating_point())
    for name, tensor in (*encoder.named_parameters(), *buffers):
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise IntegrityError(
                f"tensor '{name}' must be finite; got {bad} NaN or infinite values; restore the checkpoint"
            )
