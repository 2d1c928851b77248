"""Read sentence-transformers' files beside a checkpoint: pooling and the layers after it, the longest text, lower case, prompts."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported
from bertopt.modeling.checkpoint_files import read_json
from bertopt.modeling.modules_json import MODULES, Module, read_modules
from bertopt.spec import DenseLayer, PoolingMode
from bertopt.system.untrusted import plain

PROMPTS = "config_sentence_transformers.json"
#: Names of the file with the transformer's settings, of which sentence-transformers reads the first that exists.
SETTINGS = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"))
#: Settings that sentence-transformers passes to transformers as options of tokenizer, network and configuration, also under older names.
OPTIONS = ("tokenizer_args", "processor_kwargs", "model_args", "model_kwargs", "config_args", "config_kwargs", "processing_kwargs")
#: Settings that truncate or pad queries and documents differently.
_TASKS = ("query_length", "document_length", "query_expansion")
#: Where SetFit keeps its classifier.
SETFIT = "model_head.pkl"
#: The modules that bertopt has.
_KINDS = ("Transformer", "MLMTransformer", "Pooling", "SpladePooling", "Dense", "Normalize", "Dropout")
#: torch's classes that may follow a Dense's product.
_ACTIVATIONS: dict[str, Literal["identity", "tanh", "relu", "gelu"]] = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu"}
#: Options of a Dense or Normalize that change what it computes, and their values without effect.
_DEFAULTS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding", "use_residual": False}
#: What a transformer may be asked for, by its task: its last layer, its scores or, for SPLADE, its logits, under these names.
_GIVES = {
    "feature-extraction": ("last_hidden_state", "token_embeddings"), "sequence-classification": ("logits", "scores"),
    "fill-mask": ("logits", "token_embeddings"),
}  # fmt: skip
#: Options of a SpladePooling, of which the first is the default.
_SPLADE = {"pooling_strategy": ("max", "sum"), "activation_function": ("relu", "log1p_relu")}
#: Message where a prompt would be pooled together with the text.
NO_PROMPTS = "cannot put a prompt before a text, since the model's pooling leaves prompts out (include_prompt: false)"
#: Remedy for a model with steps after pooling that bertopt does not support.
_ADVICE = "for the vectors of its tokens, give bertopt a copy without modules.json"


class Modules(NamedTuple):
    """The modules after the transformer, and the stated longest text [tokens]; none of these for a directory of transformers."""

    pooling: PoolingMode | None = None
    dense: tuple[DenseLayer, ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None


def read_sentence_transformers(directory: Path) -> Modules:
    """Return what modules.json and the files that it names say. Raises Unsupported and IntegrityError."""
    if not (directory / MODULES).is_file():
        return Modules()
    modules = read_modules(directory)
    _check_order(modules)
    configs = [(module, module.config(directory)) for module in modules if module.kind in ("Pooling", "SpladePooling", "Dense")]
    for module in modules:
        # Older versions write no folder for it.
        if module.kind == "Normalize" and not module.beside and (directory / str(module.path) / "config.json").is_file():
            _check_usual(module.folder, module.config(directory))
    _check_distinct("name", [module.name for module in modules if module.name is not None])
    _check_distinct("path", [module.folder for module, _ in configs])
    _check_output(*_settings(directory), [module.kind for module in modules])
    length = _length(*_settings(directory))
    _warn_of_dropped(directory)
    return Modules(
        next((_pooling_mode(module, config) for module, config in configs if module.kind != "Dense"), None),
        tuple(_dense(module.folder, config) for module, config in configs if module.kind == "Dense"),
        any(module.kind == "Normalize" for module in modules), length,
    )  # fmt: skip


def _check_order(modules: list[Module]) -> None:
    """Raise Unsupported for a module that bertopt does not have, or where it does not have it."""
    for module in modules:
        if module.kind not in _KINDS or ("Transformer" in module.kind and not module.beside):
            shown = f"{plain(module.kind)} at {plain(ascii(module.path))}"
            raise Unsupported(f"modules.json: every module must be a Transformer (beside it), Pooling, Dense, Normalize or SpladePooling; got {shown}: {_ADVICE}")
    # Dropout does something in training alone.
    if not re.fullmatch("(TPD*N*|T|[TM]S)?", "".join(module.kind[0] for module in modules if module.kind != "Dropout")):
        shown = plain(", ".join(module.kind for module in modules))
        raise Unsupported(f"modules.json: the order must be Transformer, one Pooling, any Dense, Normalize, or Transformer, SpladePooling; got {shown}: {_ADVICE}")


def _check_distinct(key: str, stated: list[str]) -> None:
    if len(set(stated)) < len(stated):
        raise Unsupported(f"modules.json: each module must have its own {key}; got {plain(ascii(', '.join(stated)))}: {_ADVICE}")


def lowers(directory: Path) -> bool:
    """Return whether sentence-transformers puts texts in lower case before the tokenizer reads them."""
    return (directory / MODULES).is_file() and bool(_settings(directory)[1].get("do_lower_case"))


def lower(backend: Any) -> None:
    """Put lower case first in a tokenizer's normalizer, as sentence-transformers does: tokenizer.json then says it to all."""
    from tokenizers.normalizers import Lowercase, Sequence

    before = backend.normalizer
    several: Any = before if isinstance(before, Sequence) else [before] if before is not None else []
    steps = list(several)
    if not any(isinstance(step, Lowercase) for step in steps):
        backend.normalizer = Sequence([Lowercase(), *steps])


def read_prompts(directory: Path) -> dict[str, str]:
    """Return what may be put before a text, by name: none where the pooling would leave its tokens out, nor what is no text."""
    prompts = _prompt_fields(directory).get("prompts") if (directory / MODULES).is_file() else None
    if not isinstance(prompts, dict) or leaves_prompts_out(directory):
        return {}
    return {name: prompt for name, prompt in prompts.items() if _is_text(name) and _is_text(prompt)}


def leaves_prompts_out(directory: Path) -> bool:
    """Return whether the pooling takes the tokens after a prompt alone, as INSTRUCTOR's does. The networks here pool all of a text's."""
    poolings = [module.config(directory) for module in read_modules(directory) if module.kind == "Pooling"]
    return not all(config.get("include_prompt", True) for config in poolings)


def _is_text(value: Any) -> bool:
    """Whether it is a string, and valid Unicode: JSON can spell half a surrogate pair."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _prompt_fields(directory: Path) -> dict[str, Any]:
    found = read_json(directory / PROMPTS) if (directory / PROMPTS).is_file() else {}
    return found if isinstance(found, dict) else {}


def _settings(directory: Path) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the file of settings."""
    name = next((name for name in SETTINGS if (directory / name).is_file()), None)
    found = read_json(directory / name) if name is not None else {}
    if not isinstance(found, dict):
        raise IntegrityError(f"{name} must be a JSON object; restore the checkpoint")
    return name or SETTINGS[0], found


def _length(name: str, settings: dict[str, Any]) -> Any:
    """Return the longest text that the settings state, as sentence-transformers reads them: what it gives the tokenizer first."""
    length, where = settings.get("max_seq_length"), f"{name}: max_seq_length"
    unread = [key for key in _TASKS if settings.get(key) is not None]
    for key in OPTIONS:
        options = settings.get(key)
        for option, value in options.items() if isinstance(options, dict) else ():
            if option == "model_max_length" and key in OPTIONS[:2]:
                length, where = value, f"{name}: {key}.{option}"
            else:
                unread.append(f"{key}.{option}")
    check_length(where, length)
    if unread:
        shown = plain(ascii(", ".join(unread)))
        warnings.warn(f"{name}: bertopt does not read {shown}; compare a few vectors with sentence-transformers'", CheckpointWarning, stacklevel=4)
    return length


def _check_output(name: str, settings: dict[str, Any], kinds: list[str]) -> None:
    """Raise Unsupported where the transformer gives something else than its last layer, a classifier's scores or, for SPLADE, its logits."""
    usual = "fill-mask" if "MLMTransformer" in kinds else "feature-extraction"
    task, modalities = settings.get("transformer_task", usual), settings.get("modality_config")
    known = [each for each in _GIVES if (each == "fill-mask") == ("SpladePooling" in kinds)]
    if task not in known:
        raise Unsupported(f"{name}: transformer_task must be {' or '.join(known)}; got {plain(ascii(task))}: {_ADVICE}")
    output, called = _GIVES[task]
    expected = {"module_output_name": called}
    stated = {"module_output_name": settings.get("module_output_name", called)}
    if modalities is not None:
        text = modalities.get("text") if isinstance(modalities, dict) else None
        expected |= {"method": "forward", "method_output_name": output}
        stated |= {key: text.get(key) if isinstance(text, dict) else None for key in ("method", "method_output_name")}
    for key, value in stated.items():
        if value not in (expected[key], [expected[key]]):
            raise Unsupported(f"{name}: {key} must be {expected[key]}; got {plain(ascii(value))}: {_ADVICE}")


def _warn_of_dropped(directory: Path) -> None:
    """Name what sentence-transformers does around the model by default, and an artefact does not: it puts a prompt before
    every text, where who asks an artefact says which text is a query, and cuts vectors off; or what SetFit does behind it."""
    if (directory / SETFIT).is_file():
        warnings.warn(f"{SETFIT}: bertopt does not read SetFit's classifier: an artefact gives the vectors that it reads", CheckpointWarning, stacklevel=4)
    fields = _prompt_fields(directory)
    name, prompts, dimensions, active = (fields.get(key) for key in ("default_prompt_name", "prompts", "truncate_dim", "max_active_dims"))
    if isinstance(name, str) and isinstance(prompts, dict) and prompts.get(name):
        said = f"puts no prompt before a text by default: give prompt_name={plain(ascii(name))} with texts that need it"
        if leaves_prompts_out(directory):
            said = f"{NO_PROMPTS}: its vectors are those of sentence-transformers with prompt=''"
        if fields.get("model_type") == "CrossEncoder":
            said = f"puts no prompt before a text by default: put {plain(ascii(prompts[name]))} before the first text of each pair yourself"
        warnings.warn(f"{PROMPTS}: an artefact {said}", CheckpointWarning, stacklevel=4)
    if dimensions is not None:
        shown = plain(ascii(dimensions))
        warnings.warn(f"{PROMPTS}: dropped truncate_dim {shown}: an artefact gives whole vectors: take the first {shown} numbers of each, or ask a server for dimensions", CheckpointWarning, stacklevel=4)
    if active is not None:
        shown = plain(ascii(active))
        warnings.warn(f"{PROMPTS}: dropped max_active_dims {shown}: an artefact gives all weights: take the {shown} largest of each", CheckpointWarning, stacklevel=4)


def warn_of_other_scores(config: Any, directory: Path) -> None:
    """Name the function that CrossEncoder puts one label's score through, where an artefact gives another: the value itself of what was
    trained as a regression, else its sigmoid. Newer versions state the function in a file of their own."""
    stated = getattr(config, "sentence_transformers", None)
    older = stated.get("activation_fn") if isinstance(stated, dict) else getattr(config, "sbert_ce_default_activation_function", None)
    newer = _prompt_fields(directory).get("activation_fn")
    name, function = (PROMPTS, newer) if newer is not None else ("config.json", older)
    usual, given = ("Identity", "the value itself") if config.problem_type == "regression" else ("Sigmoid", "the sigmoid")
    if config.num_labels == 1 and isinstance(function, str) and (shown := function.rpartition(".")[2]) != usual:
        shown = plain(ascii(shown))
        warnings.warn(f"{name}: CrossEncoder scores by {shown}, an artefact by {given}, in the same order: predictor.logits gives raw scores", CheckpointWarning, stacklevel=4)


def check_length(name: str, value: Any) -> None:
    """Raise IntegrityError where a file states a longest text that cannot be. None states nothing."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise IntegrityError(f"{name} must be a whole number of at least 1, or null; got {plain(ascii(value))}; restore the checkpoint")


def _dense(folder: str, fields: dict[str, Any]) -> DenseLayer:
    named, size = fields.get("activation_function", "torch.nn.modules.activation.Tanh"), fields.get("out_features")
    activation = _ACTIVATIONS.get(str(named).rpartition(".")[2]) if str(named).startswith("torch.nn.") else None
    if activation is None:
        shown = plain(ascii(named))
        raise Unsupported(f"{folder}: activation_function must be torch.nn's {', '.join(_ACTIVATIONS)}; got {shown}: {_ADVICE}")
    _check_usual(folder, fields)
    check_length(f"{folder}/config.json: out_features", size)
    if size is None:
        raise IntegrityError(f"{folder}/config.json must state out_features; restore the checkpoint")
    return DenseLayer(folder=folder, size=size, activation=activation)


def _check_usual(folder: str, fields: dict[str, Any]) -> None:
    """Raise Unsupported for a module that reads or writes something else than the text's vector, or adds what it read."""
    other = next((key for key, value in _DEFAULTS.items() if fields.get(key) not in (None, value)), None)
    if other is not None:
        shown = plain(ascii(fields[other]))
        raise Unsupported(f"{folder}: {other} must be {_DEFAULTS[other]}; got {shown}: {_ADVICE}")


def _pooling_mode(module: Module, fields: dict[str, Any]) -> PoolingMode:
    if module.kind == "SpladePooling":
        strategy, activation = (fields.get(key, known[0]) for key, known in _SPLADE.items())
        if other := next((key for key, known in _SPLADE.items() if fields.get(key, known[0]) not in known), None):
            raise Unsupported(f"{module.folder}: {other} must be {' or '.join(_SPLADE[other])}; got {plain(ascii(fields[other]))}: {_ADVICE}")
        if activation == "relu":
            return "splade" if strategy == "max" else "splade_sum"
        return "splade_log1p" if strategy == "max" else "splade_sum_log1p"
    short: dict[str, PoolingMode] = {
        "cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "mean_sqrt_len_tokens": "mean_sqrt_len",
        "cls": "cls", "mean": "mean", "max": "max", "mean_sqrt_len": "mean_sqrt_len",
    }  # fmt: skip
    mode = fields.get("pooling_mode")
    on = [
        key.removeprefix("pooling_mode_") for key, value in fields.items() if key.startswith("pooling_mode_") and value
    ]
    modes = [mode] if isinstance(mode, str) else (mode or on or ["mean"])
    if len(modes) != 1 or modes[0] not in short:
        raise Unsupported(f"1_Pooling: mode must be one of cls, mean, max, mean_sqrt_len; got {', '.join(modes)}: {_ADVICE}")
    return short[modes[0]]
