"""The tokenizer of a checkpoint: fast, with no remote code, and no larger than the embedding."""

from __future__ import annotations

import json
import shutil
import warnings
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported, UsageError, missing_library
from bertopt.modeling import esm_tokenizer, sentence_transformers
from bertopt.modeling.checkpoint_files import read_json
from bertopt.modeling.source import scrub
from bertopt.system import temporary_directory
from bertopt.system.untrusted import first_line, plain

#: Names under which checkpoints have a SentencePiece model.
_SENTENCEPIECE = ("spm.model", "spiece.model", "sentencepiece.bpe.model", "sentencepiece.model", "tokenizer.model")
#: What a tokenizer.json of that class states in place of the program is another splitting, which gives other tokens.
_JIEBA = (
    "RoFormerTokenizer splits texts into Chinese words with a Python program (rjieba), which no tokenizer.json holds, and artefacts run no such programs; for a "
    "checkpoint that was trained with another tokenizer, state its class in tokenizer_config.json: tokenizer_class BertTokenizer with vocab.txt, or PreTrainedTokenizerFast with tokenizer.json"
)


def open_tokenizer(directory: Path) -> Any:
    """Return the checkpoint's fast tokenizer, as transformers (or sentence-transformers) builds it, from a configuration that names no code.

    Raises UsageError where there is none, Unsupported where it runs in Python alone (ESM's is converted) or a library to read it is missing,
    IntegrityError without a pad token.
    """
    from transformers import AutoTokenizer

    _check_readers(directory)
    config = directory / "tokenizer_config.json"
    fields, dropped = scrub(read_json(config)) if config.is_file() else ({}, [])
    source: Path = directory
    with temporary_directory.make() as clean:
        if dropped:
            source = Path(clean)
            for path in directory.iterdir():
                if path.is_file() and path.suffix not in {".safetensors", ".bin", ".py"}:
                    shutil.copyfile(path, source / path.name)
            (source / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")
        try:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, ImportError) as error:
            if "rjieba" in str(error):
                raise Unsupported(_JIEBA) from error
            raise UsageError(f"'{directory}' has no tokenizer that transformers can load ({plain(first_line(error))}); give one with tokenizer.json") from error
    if type(tokenizer).__name__ == "EsmTokenizer":
        tokenizer = esm_tokenizer.convert(tokenizer)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise Unsupported(
            f"{type(tokenizer).__name__} runs in Python alone, and transformers cannot make the tokenizer.json of it that an artefact needs; "
            "give a copy of the checkpoint that has one, whose ids are those that the model was trained with"
        )
    if type(tokenizer).__name__.startswith("RoFormerTokenizer"):
        raise Unsupported(_JIEBA)
    if sentence_transformers.lowers(directory):
        sentence_transformers.lower(tokenizer.backend_tokenizer)
    if tokenizer.pad_token_id is None:
        raise IntegrityError("the tokenizer must have a pad token; add pad_token to tokenizer_config.json")
    return tokenizer


def _check_readers(directory: Path) -> None:
    """Raise Unsupported for a tokenizer that is a SentencePiece model alone, where a library is missing: transformers then takes it for a
    file of tiktoken."""
    model = next((name for name in _SENTENCEPIECE if (directory / name).is_file()), None)
    if model is None or (directory / "tokenizer.json").exists():
        return
    missing = [name for name in ("sentencepiece", "protobuf") if not any(metadata.distributions(name=name))]
    if missing:
        raise missing_library(
            f"the tokenizer is a SentencePiece model ('{model}'), which transformers reads with {' and '.join(missing)}", " ".join(missing),
            "save the tokenizer with transformers on a machine that has them, which gives tokenizer.json",
        )  # fmt: skip


#: The tokens that a predictor looks for where no file states others.
_USUAL = {"unk_token": "[UNK]", "mask_token": "[MASK]"}


def special_token(directory: Path, key: str) -> str:
    """Return a special token by its key in the files of a stage's tokenizer, such as `mask_token`, or its usual spelling."""
    token: Any = None
    for path in (directory / "tokenizer_config.json", directory / "special_tokens_map.json"):
        token = token or (read_json(path).get(key) if path.is_file() else None)
    return str((token["content"] if isinstance(token, dict) else token) or _USUAL[key])


def warn_of_two_separators(tokenizer: Any) -> None:
    """Warn where a DeBERTa's tokenizer puts two separators between the texts of a pair: transformers' class does since version 5, whatever
    tokenizer.json says, and the published models were trained with one."""
    ids, separator = tokenizer("a", "b")["input_ids"], tokenizer.sep_token_id
    if any(one == other == separator for one, other in pairwise(ids)):
        warnings.warn(
            f"the installed transformers' {type(tokenizer).__name__} puts two {plain(str(tokenizer.sep_token))} between the texts of a pair, as in every answer to one here; "
            "before version 5 it put one, as in training: for those answers save tokenizer.json with transformers 4 and state "
            '"tokenizer_class": "PreTrainedTokenizerFast" in tokenizer_config.json',
            CheckpointWarning, stacklevel=3,
        )  # fmt: skip


def told(tokenizer: Any) -> dict[str, Any]:
    """Return what transformers' tokenizer takes from its class or from tokenizer.json where tokenizer_config.json leaves it out: unusual tokens
    for a mask and for what it does not know, that texts lose their beginning (by default their end), and that they have no types. An artefact is
    read without that class."""
    tokens = {key: getattr(tokenizer, key) for key in _USUAL}
    left = {"truncation_side": "left"} if tokenizer.truncation_side == "left" else {}
    # Of the classes whose files number two segments, the one that gives no types in any version of transformers.
    untyped = {"model_input_names": list(tokenizer.model_input_names)} if type(tokenizer).__name__.startswith("DistilBertTokenizer") else {}
    return {**{key: str(token) for key, token in tokens.items() if token not in (None, _USUAL[key])}, **left, **untyped}


#: Texts that are encoded to see what the tokenizer adds, and how many tokens a character may become.
_SAMPLE, _MOST_TOKENS = "The quick brown fox jumps over the lazy dog", 16


def check_tokenizer(tokenizer: Any, encoder: Any) -> None:
    """Raise IntegrityError where the tokenizer gives ids or types for which there is no embedding, or makes texts far longer."""
    rows = encoder.get_input_embeddings().weight.shape[0]
    token, largest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if largest >= rows:
        name = next(n for n, p in encoder.named_parameters() if p is encoder.get_input_embeddings().weight)
        raise IntegrityError(
            f"tensor '{name}' has {rows} rows, but the tokenizer's token '{token}' is number {largest}; pair the model with its own tokenizer"
        )
    backend = tokenizer.backend_tokenizer
    normal = backend.normalizer.normalize_str(_SAMPLE) if backend.normalizer is not None else _SAMPLE
    if len(normal) > _MOST_TOKENS * len(_SAMPLE):
        raise IntegrityError(
            f"the tokenizer's normalizer turns {len(_SAMPLE)} characters into {len(normal):,}; restore tokenizer.json"
        )
    for encoded in (backend.encode(_SAMPLE), backend.encode(_SAMPLE, "a")):
        if len(encoded.ids) > _MOST_TOKENS * len(_SAMPLE):
            raise IntegrityError(
                f"the tokenizer turns {len(_SAMPLE)} characters into {len(encoded.ids):,} tokens; restore tokenizer.json"
            )
        if max(encoded.ids, default=0) >= rows:
            raise IntegrityError(
                f"the tokenizer's post-processor adds token {max(encoded.ids)}, but the embedding has {rows} rows; restore tokenizer.json"
            )
        types = int(getattr(encoder.config, "type_vocab_size", 0) or 0)
        if types > 1 and max(encoded.type_ids, default=0) >= types:
            raise IntegrityError(
                f"the tokenizer gives token type {max(encoded.type_ids)}, but the model has {types}; restore tokenizer.json"
            )
