"""Hostile checkpoints: each is a tiny good one with one thing spoilt, and the exit codes that are promised for it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

#: Exit codes: 0 the input is harmless, 2 usage, 3 a gate, 4 unsupported here, 5 resources, 6 integrity, 7 timeout.
REFUSED = frozenset({2, 4, 5, 6})
HARMLESS = frozenset({0, 2, 3, 4, 5, 6})
DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True)
class Hostile:
    name: str
    spoil: Callable[[Path], object]
    codes: frozenset[int] = REFUSED


def edit(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / file
        fields = json.loads(path.read_text("utf-8")) if path.exists() else {}
        changed = change(fields)
        path.write_text(json.dumps(fields if changed is None else changed), "utf-8")

    return spoil


def put(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.__setitem__(key, value)


def write(file: str, content: bytes) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / file
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)

    return spoil


def remove(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).unlink()


SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
    "max_position_embeddings", "type_vocab_size", "pad_token_id",
)  # fmt: skip
VALUES: tuple[Any, ...] = ("32", None, 0, -1, -2, 1.5, [], {}, True, 10**9, 10**30, "x" * 5000)
FIELDS: tuple[tuple[str, Any], ...] = (
    ("hidden_act", "no_such"), ("hidden_act", 7), ("hidden_act", None), ("model_type", "gpt2"), ("model_type", "t5"), ("model_type", "../../etc"),
    ("model_type", None), ("model_type", ["bert"]), ("architectures", ["os.system"]), ("architectures", "BertModel"),
    ("architectures", []), ("architectures", [None]), ("id2label", ["a", "b"]), ("id2label", {"a": "b"}), ("id2label", {}),
    ("id2label", {"0": {"deep": 1}}), ("layer_norm_eps", -1), ("layer_norm_eps", "1e-5"), ("hidden_dropout_prob", 2.0),
    ("attention_probs_dropout_prob", "no"), ("is_decoder", True), ("add_cross_attention", True), ("num_labels", 10**9),
    ("torch_dtype", "float99"), ("dtype", {"a": 1}), ("problem_type", "nonsense"), ("position_embedding_type", "relative_key_query"),
    ("quantization_config", {"quant_method": "bitsandbytes"}), ("auto_map", {"AutoModel": "evil.py--Evil"}),
    ("_attn_implementation_internal", "evil/kernel"), ("rope_scaling", {"type": "x"}), ("tie_word_embeddings", "yes"),
    ("initializer_range", None), ("transformers_version", 3), ("chunk_size_feed_forward", -3), ("use_cache", "x"),
)  # fmt: skip
TOKENIZER: tuple[tuple[str, Any], ...] = (
    ("version", "9.9"), ("model", None), ("model", {}), ("model", {"type": "Nope"}), ("pre_tokenizer", {"type": "Nope"}), ("added_tokens", "x"),
    ("added_tokens", [{"id": 10**9, "content": "[X]", "special": True}]), ("post_processor", {"type": "Nope"}), ("normalizer", 3),
    ("truncation", {"max_length": -1}), ("normalizer", {"type": "Replace", "pattern": {"Regex": "(a+)+$("}, "content": ""}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "[a-z]"}, "content": "z" * 100_000}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Removed", "invert": False}),
    ("decoder", {"type": "Nope"}), ("padding", {"pad_id": -5}),
    ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}], "pair": [], "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [999999], "tokens": ["[CLS]"]}}}),
    ("post_processor", {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 77}}, {"Sequence": {"id": "A", "type_id": 50}}], "pair": [], "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [2], "tokens": ["[CLS]"]}}}),
)  # fmt: skip
BYTES = {
    "empty": b"", "null": b"null", "list": b"[]", "number": b"7", "cut": b'{"a": ', "not UTF-8": b"\xff\xfe{}", "BOM": b"\xef\xbb\xbf{}",
    "deep": DEEP.encode(), "long number": b'{"vocab_size": ' + b"9" * 5000 + b"}", "NaN": b'{"hidden_size": NaN}', "zeros": b"\0" * 4096,
}  # fmt: skip


def safetensors(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def first_tensor(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the entry of the first tensor in the header."""

    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        change(header[next(name for name in header if name != "__metadata__")])
        path.write_bytes(safetensors(header, data[8 + size :]))

    return spoil


def renamed(name: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        path = directory / "model.safetensors"
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        header[name] = header.pop(next(key for key in header if key != "__metadata__"))
        path.write_bytes(safetensors(header, data[8 + size :]))

    return spoil


def sharded(index: Any) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        (directory / "model.safetensors.index.json").write_text(json.dumps(index) if not isinstance(index, str) else index)

    return spoil


def unreadable(file: str) -> Callable[[Path], None]:
    return lambda directory: (directory / file).chmod(0)


def is_directory(file: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / file).unlink(missing_ok=True)
        (directory / file).mkdir()

    return spoil


def link(file: str, target: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / file).unlink(missing_ok=True)
        os.symlink(target, directory / file)

    return spoil


def every() -> Iterator[Hostile]:
    """All hostile checkpoints, numbered. A canary (`canary.py`, pickles) shows whether code of a checkpoint ever ran."""
    for number, case in enumerate(_every(), 1):
        yield replace(case, name=f"{number}: {case.name}")


def _every() -> Iterator[Hostile]:
    for key in SIZES:
        for value in VALUES:
            yield Hostile(f"config {key} = {str(value)[:12]!r}", edit("config.json", put(key, value)), HARMLESS)
    for key, value in FIELDS:
        yield Hostile(f"config {key} = {str(value)[:30]!r}", edit("config.json", put(key, value)), HARMLESS)
    for key, value in TOKENIZER:
        yield Hostile(f"tokenizer {key} = {str(value)[:30]!r}", edit("tokenizer.json", put(key, value)), HARMLESS)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "modules.json", "sentence_bert_config.json"):
        for kind, content in BYTES.items():
            yield Hostile(f"{file}: {kind}", write(file, content), HARMLESS if file != "config.json" else REFUSED)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        yield Hostile(f"{file} missing", remove(file))
        yield Hostile(f"{file} is a directory", is_directory(file))
        yield Hostile(f"{file} is a broken link", link(file, "/nonexistent/x"))
        yield Hostile(f"{file} is a device", link(file, "/dev/zero") if file != "model.safetensors" else link(file, "/dev/full"))
        if os.geteuid():
            yield Hostile(f"{file} cannot be read", unreadable(file))
    weights = "model.safetensors"
    for name, content in {
        "empty": b"", "8 bytes": b"\0" * 8, "huge header": safetensors(b"{}", length=2**63 - 1), "header not JSON": safetensors(b"{x"),
        "deep header": safetensors(DEEP.encode()), "no tensors": safetensors({}), "pickle": b"\x80\x04c__builtin__\neval\n(Vopen('CANARY','w')\ntR.",
        "zip": b"PK\x03\x04" + b"\0" * 100, "header is a list": safetensors([1]),
    }.items():  # fmt: skip
        yield Hostile(f"{weights}: {name}", write(weights, content))
    for name, change in {
        "other shape": lambda e: e.__setitem__("shape", [1, 1]), "negative shape": lambda e: e.__setitem__("shape", [-1, 4]),
        "huge shape": lambda e: e.__setitem__("shape", [2**40, 2**40]), "other dtype": lambda e: e.__setitem__("dtype", "I32"),
        "unknown dtype": lambda e: e.__setitem__("dtype", "F4096"), "offsets beyond": lambda e: e.__setitem__("data_offsets", [0, 2**50]),
        "offsets backwards": lambda e: e.__setitem__("data_offsets", [8, 0]), "offsets text": lambda e: e.__setitem__("data_offsets", "x"),
    }.items():  # fmt: skip
        yield Hostile(f"{weights}: {name}", first_tensor(change))
    for name in ("../../../canary", "x" * 100_000, "\x1b[2J\x1b]0;owned\x07", "a\nb", ""):
        yield Hostile(f"tensor named {name[:10]!r}", renamed(name))
    yield Hostile("truncated weights", lambda d: (d / weights).write_bytes((d / weights).read_bytes()[:-100]))
    indices: list[Any] = [[], "null", {"weight_map": {}}, {"weight_map": []}, {"weight_map": {"a": "../../x"}}, {"weight_map": {"a": 7}}, {"weight_map": {"a": "missing.safetensors"}}, {}, DEEP]
    for index in indices:
        yield Hostile(f"index {str(index)[:30]}", sharded(index))
    for file in ("pytorch_model.bin", "model.pt", "tf_model.h5"):
        yield Hostile(f"only {file}", lambda d, f=file: (d / weights).rename(d / f))  # type: ignore[misc]
    st = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
    pool = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
    for name, modules in {
        "dict": {}, "missing folder": [st, pool], "outside": [st, {**pool, "path": "../../etc"}], "unknown": [st, {**pool, "type": "evil.Module"}],
        "no type": [{}], "numbers": [1, 2], "dense": [st, {**pool, "type": "sentence_transformers.models.Dense"}],
    }.items():  # fmt: skip
        yield Hostile(f"modules.json: {name}", write("modules.json", json.dumps(modules).encode()), HARMLESS)
    for value in (-1, 0, "x", 10**9, None, 1.5, []):
        def long(directory: Path, value: Any = value) -> None:
            write("modules.json", json.dumps([st]).encode())(directory)
            write("sentence_bert_config.json", json.dumps({"max_seq_length": value}).encode())(directory)

        yield Hostile(f"max_seq_length {value!r}", long, HARMLESS)
    for key, value in (
        ("tokenizer_class", "os.system"), ("tokenizer_class", "GPT2Tokenizer"), ("tokenizer_class", 7), ("auto_map", {"AutoTokenizer": ["evil.py", None]}),
        ("model_max_length", -1), ("model_max_length", "x"), ("model_max_length", None), ("model_max_length", 10**40), ("pad_token", None), ("pad_token", "nope"), ("pad_token", {}),
        ("chat_template", "{{ ''.__class__ }}"), ("added_tokens_decoder", {"x": 1}), ("cls_token", 7), ("extra_special_tokens", [1]),
    ):  # fmt: skip
        yield Hostile(f"tokenizer_config {key} = {str(value)[:20]!r}", edit("tokenizer_config.json", put(key, value)), HARMLESS)
