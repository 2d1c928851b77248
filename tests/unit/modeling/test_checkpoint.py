"""Loading a checkpoint: what is read, what is refused, and whose outputs the reference gives."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bertopt.core import Eager
from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported, UsageError
from bertopt.modeling import checkpoint, source
from bertopt.modeling.tokenizer import open_tokenizer
from tests.support.forms import with_config
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, TASKS, Tiny, write_tiny

Tensors = dict[str, torch.Tensor]


def copied(original: Path, out: Path) -> Path:
    shutil.copytree(original, out, dirs_exist_ok=True)
    return out


def with_weights(directory: Path, edit: Callable[[Tensors], None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def bert(tiny: Tiny, tmp_path: Path) -> Path:
    """A tiny BERT classifier of one's own, to be damaged."""
    return copied(tiny("bert"), tmp_path / "bert")


def answers(model: Eager, batch: int = 3, sequence: int = 9) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        return model.network(*model.network.example(batch, sequence))


# What classes are called


def test_classes_may_be_called_by_numbers(bert: Path) -> None:
    """As fine-tuning on a data set with numbers for classes leaves them."""
    with_config(bert, id2label={"0": 1, "1": 2.5, "2": 3}, label2id=None)
    assert checkpoint.load(bert).spec.labels == ("1", "2.5", "3")


def test_classes_of_the_same_name_are_warned_of(bert: Path) -> None:
    with_config(bert, id2label={"0": "a", "1": "b", "2": "a"}, label2id=None)
    with pytest.warns(UserWarning, match="id2label names several classes 'a': answers do not tell them apart"):
        assert checkpoint.load(bert).spec.labels == ("a", "b", "a")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"0": "a", "1": "b", "3": "c"}, r"must name the classes 0 to 2; got \[0, 1, 3\]"),
        ({"0": "a", "1": None, "2": "c"}, r"class 1 has None"),
        ({"0": "a", "1": "b", "2": ["c"]}, r"class 2 has \['c'\]"),
    ],
)
def test_a_class_without_a_name_is_named(bert: Path, names: dict[str, Any], words: str) -> None:
    with_config(bert, id2label=names, label2id=None)
    with pytest.raises(IntegrityError, match=words):
        checkpoint.load(bert)


def test_padding_on_the_left_is_warned_of_where_answers_depend_on_it(bert: Path, tmp_path: Path) -> None:
    with_config(bert, "tokenizer_config.json", padding_side="left")
    with pytest.warns(UserWarning, match="padding_side is left, so that other libraries' answers to a text of bert depend on the texts beside it"):
        checkpoint.load(bert)
    rotary = write_tiny(tmp_path / "rotary", "modernbert", "feature-extraction", "mean")
    with_config(rotary, "tokenizer_config.json", padding_side="left")
    with warnings.catch_warnings():
        warnings.simplefilter("error", CheckpointWarning)
        checkpoint.load(rotary)


# What may be loaded


def test_code_fields_are_dropped_with_a_warning(bert: Path) -> None:
    plain = answers(checkpoint.load(bert))
    with_config(
        bert, auto_map={"AutoModel": "evil.Model"}, trust_remote_code=True, _attn_implementation_internal="evil/kernel"
    )
    with_config(bert, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    with pytest.warns(UserWarning, match="dropped _attn_implementation_internal, auto_map, trust_remote_code"):
        model = checkpoint.load(bert)
    assert torch.allclose(answers(model)[0], plain[0], atol=1e-6)
    assert model.network.base.config._attn_implementation == "eager"
    assert not hasattr(model.network.base.config, "auto_map")


def test_scrub_reaches_every_depth() -> None:
    fields, dropped = source.scrub({"a": [{"auto_map": {"x": "y"}, "b": 1}], "_attn_implementation": None})
    assert fields == {"a": [{"b": 1}]}
    assert dropped == ["auto_map"]


def test_pickled_weights_are_refused(bert: Path) -> None:
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    with pytest.raises(IntegrityError, match=r"pytorch_model\.bin, which can run code when loaded"):
        checkpoint.load(bert)


def test_pickled_weights_are_read_once_converted_as_the_message_says(bert: Path) -> None:
    """With their head, and beside the tokenizer: AutoModel would write neither."""
    import transformers

    plain, path = answers(checkpoint.load(bert))[0], bert / "model.safetensors"
    torch.save(load_file(path), bert / "pytorch_model.bin")
    path.unlink()
    with pytest.raises(IntegrityError) as caught:
        checkpoint.load(bert)
    (name,) = re.findall(r": (\w+)\.from_pretrained\(DIR\)\.save_pretrained\(DIR\)", str(caught.value))
    getattr(transformers, name).from_pretrained(bert).save_pretrained(bert)
    assert torch.allclose(answers(checkpoint.load(bert))[0], plain, atol=1e-6)


@pytest.mark.parametrize("name", ["position_ids", "token_type_ids"])
def test_stored_whole_numbers_of_older_versions_are_left_out(bert: Path, name: str) -> None:
    with_weights(bert, lambda tensors: tensors.update({f"bert.embeddings.{name}": torch.arange(8)[None]}))
    assert checkpoint.load(bert).spec.task == "text-classification"


@pytest.mark.parametrize("fields", [{"return_dict": False}, {"chunk_size_feed_forward": 5}])
def test_a_configuration_that_asks_for_tuples_or_chunks_changes_nothing(bert: Path, fields: dict[str, Any]) -> None:
    expected = answers(checkpoint.load(bert))
    found = answers(checkpoint.load(with_config(bert, **fields)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_no_weights(bert: Path) -> None:
    (bert / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"has no model\.safetensors"):
        checkpoint.load(bert)


def test_truncated_weights(bert: Path) -> None:
    path = bert / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        checkpoint.load(bert)


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"bert"'])
def test_config_that_is_no_json_object(bert: Path, text: str) -> None:
    (bert / "config.json").write_text(text)
    with pytest.raises(IntegrityError, match=r"config\.json.? must be"):
        checkpoint.load(bert)


def test_no_config(bert: Path) -> None:
    (bert / "config.json").unlink()
    with pytest.raises(UsageError, match=r"has no config\.json"):
        checkpoint.load(bert)


def test_shards(bert: Path) -> None:
    whole = answers(checkpoint.load(bert))
    tensors = load_file(bert / "model.safetensors")
    (bert / "model.safetensors").unlink()
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, bert / file, metadata={"format": "pt"})
    weight_map = {key: file for file, keys in halves.items() for key in keys}
    (bert / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert torch.allclose(answers(checkpoint.load(bert))[0], whole[0], atol=1e-6)
    (bert / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match="model-00002-of-00002"):
        checkpoint.load(bert)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "sub/model.safetensors"])
def test_shards_outside_the_directory(bert: Path, name: str) -> None:
    (bert / "model.safetensors").rename(bert.parent / "model.safetensors")
    (bert / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(IntegrityError, match=f"must name files beside it; got '{name}'"):
        checkpoint.load(bert)


# Weights that fit


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(bert: Path, value: float) -> None:
    name = "bert.encoder.layer.1.output.dense.weight"

    def spoil(tensors: Tensors) -> None:
        tensors[name][3, 4] = value

    with pytest.raises(IntegrityError, match=f"'{name}' must be finite; got 1 NaN or infinite"):
        checkpoint.load(with_weights(bert, spoil))


def test_missing_head_is_named(tiny: Tiny) -> None:
    with pytest.raises(IntegrityError, match=r"'classifier\.weight' is missing .*freshly initialised"):
        checkpoint.load(tiny("bert", "feature-extraction"), task="text-classification")


def test_mismatched_shape_is_named(bert: Path) -> None:
    with pytest.raises(IntegrityError, match=r"intermediate\.dense\.weight' has shape \[64, 32\] .*\[48, 32\]"):
        checkpoint.load(with_config(bert, intermediate_size=48))


@pytest.mark.parametrize("wrapper", ["module.", "model.", "_orig_mod."])
def test_names_of_a_wrapper_around_the_model(bert: Path, wrapper: str) -> None:
    def wrap(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[wrapper + name] = tensors.pop(name)

    with_weights(bert, wrap)
    with pytest.raises(IntegrityError, match=f"tensor names begin with '{wrapper}' .*save the inner model"):
        checkpoint.load(bert)


@pytest.mark.parametrize("named", [None, {"0": "a", "1": "b"}])
def test_fewer_labels_than_the_head_has(bert: Path, named: dict[str, str] | None) -> None:
    with_config(bert, id2label=named, label2id=None)
    with pytest.raises(IntegrityError, match=r"\[3, 32\] in the checkpoint, \[2, 32\] by config.json.*config.json must have an id2label with 3 names"):
        checkpoint.load(bert)


@pytest.mark.parametrize("task", ["text-classification", "feature-extraction"])
def test_layer_beyond_the_configuration_is_named(tiny: Tiny, tmp_path: Path, task: str) -> None:
    directory = with_config(copied(tiny("bert", task), tmp_path / "deep"), num_hidden_layers=1)
    with pytest.raises(IntegrityError, match=r"'encoder\.layer\.1\.\S+' is in the checkpoint but not in the model"):
        checkpoint.load(directory)


def test_relative_positions_that_transformers_ignores_are_named(bert: Path) -> None:
    with_config(bert, position_embedding_type="relative_key")
    name = "bert.encoder.layer.0.attention.self.distance_embedding.weight"
    with_weights(bert, lambda tensors: tensors.update({name: torch.zeros(127, 16)}))
    with pytest.raises(Unsupported, match=r"relative_key.*would ignore.*absolute positions"):
        checkpoint.load(bert)


@pytest.mark.parametrize(("fields", "words"), [
    ({"use_task_id": False}, r"tensor 'ernie\.embeddings\.task_type_embeddings\.weight'\), .* use_task_id true; state both"),
    ({"task_type_vocab_size": 4}, r"task_type_embeddings\.weight' has shape \[3, 32\] in the checkpoint, \[4, 32\] by config.json"),
    ({"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, "model_type 'ernie' and use_task_id true; state both"),
], ids=str)  # fmt: skip
def test_types_of_tasks_that_transformers_would_leave_out_are_named(tiny: Tiny, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    directory = with_config(copied(tiny("ernie"), tmp_path / "ernie"), **fields)
    if "model_type" in fields:
        with_weights(directory, lambda tensors: tensors.update({name.replace("ernie.", "bert."): tensors.pop(name) for name in list(tensors)}))
    with pytest.raises(IntegrityError, match=words):
        checkpoint.load(directory)


def test_types_of_tasks_that_are_not_there_are_named(tmp_path: Path) -> None:
    directory = with_config(write_tiny(tmp_path / "ernie", "ernie", extra={"use_task_id": False}), use_task_id=True)
    with pytest.raises(IntegrityError, match=r"task_type_embeddings\.weight' is missing from the checkpoint"):
        checkpoint.load(directory)


@pytest.mark.parametrize(("field", "value", "words"), [("pool_act", "relu", "pool_act must be 'tanh'"), ("task_id", 2, "task_id must be 0")])
def test_what_paddlepaddle_computes_otherwise_is_named(tiny: Tiny, tmp_path: Path, field: str, value: Any, words: str) -> None:
    with pytest.raises(Unsupported, match=f"^config.json: {words}, as transformers' ernie computes"):
        checkpoint.load(with_config(copied(tiny("ernie"), tmp_path / "ernie"), **{field: value}))


@pytest.mark.parametrize("use_task_id", [True, False])
def test_old_names_and_buffers_of_ernie(tmp_path: Path, use_task_id: bool) -> None:
    """As in files of before transformers 4.31."""
    directory = write_tiny(tmp_path / "ernie", "ernie", extra={"use_task_id": use_task_id})
    expected = answers(checkpoint.load(directory))

    def old(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")] = tensors.pop(name)
        tensors["ernie.embeddings.position_ids"] = torch.arange(64)[None]

    with_weights(directory, old)
    assert all(torch.equal(*pair) for pair in zip(answers(checkpoint.load(directory)), expected, strict=True))


def test_tokenizer_larger_than_the_embedding(bert: Path) -> None:
    name = "bert.embeddings.word_embeddings.weight"

    def cut(tensors: Tensors) -> None:
        tensors[name] = tensors[name][:50].clone()

    with_weights(with_config(bert, vocab_size=50), cut)
    with pytest.raises(IntegrityError, match=rf"'{name}' has 50 rows, but the tokenizer's token '##z' is number \d+"):
        checkpoint.load(bert)


@pytest.mark.parametrize("missing", ["tokenizer.json", "pad_token"])
def test_tokenizer_that_cannot_serve(bert: Path, missing: str) -> None:
    if missing == "tokenizer.json":
        (bert / "tokenizer.json").unlink()
        with pytest.raises(UsageError, match="no tokenizer"):
            checkpoint.load(bert)
    else:
        with_config(bert, "tokenizer_config.json", pad_token=None)
        with pytest.raises(IntegrityError, match="must have a pad token"):
            checkpoint.load(bert)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "model_type must be one of bert, .*got 'gpt2'"),
        ({"model_type": None}, "got None"),
        ({"is_decoder": True}, "encoders only"),
        ({"add_cross_attention": True}, "encoders only"),
        ({"quantization_config": {"bits": 4}}, "full-precision"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights: rename 'other.safetensors' model.safetensors"),
    ],
)
def test_models_that_are_not_for_us(bert: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        checkpoint.load(with_config(bert, **fields))


# Tasks


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *NORM_FIRST_FAMILIES])
def test_answers_are_those_of_transformers(tiny: Tiny, family: str, task: str) -> None:
    import transformers

    directory = tiny(family, task)
    model = checkpoint.load(directory)
    assert (model.spec.family, model.spec.task, model.spec.layers, model.spec.max_length) == (family, task, 2, 64)
    assert model.precision == "float32"
    assert not model.network.training
    architecture = json.loads((directory / "config.json").read_text())["architectures"][0]
    with checkpoint.quiet():
        plain = getattr(transformers, architecture).from_pretrained(directory, attn_implementation="eager").eval()
    inputs = dict(zip(model.spec.inputs, model.network.example(3, 9), strict=True))
    assert int(inputs["attention_mask"].sum()) < 27
    with torch.inference_mode():
        expected = plain(**inputs)
    names = {"feature-extraction": ["last_hidden_state"], "question-answering": ["start_logits", "end_logits"]}
    assert list(model.spec.outputs) == names.get(task, ["logits"])
    for name, got in zip(model.spec.outputs, answers(model), strict=True):
        assert torch.allclose(got, expected[name], atol=1e-6)


@pytest.mark.parametrize(
    ("synonym", "task"), [("sequence-classification", "text-classification"), ("default", "feature-extraction")]
)
def test_synonyms_of_tasks(tiny: Tiny, synonym: str, task: str) -> None:
    assert checkpoint.load(tiny("bert", task), task=synonym).spec.task == task


@pytest.mark.parametrize("task", ["text-generation", "translation", "nonsense"])
def test_unknown_task(tiny: Tiny, task: str) -> None:
    with pytest.raises(UsageError, match=f"task must be one of feature-extraction, .*; got '{task}'"):
        checkpoint.load(tiny("bert"), task=task)


@pytest.mark.parametrize(("trained", "stated"), [("text-classification", "token-classification"), ("token-classification", "text-classification")])
def test_a_head_of_another_task_is_refused_though_its_shapes_fit(tiny: Tiny, trained: str, stated: str) -> None:
    with pytest.raises(UsageError, match=f"was trained for {trained} .*; got task: {stated}"):
        checkpoint.load(tiny("bert", trained), task=stated)


@pytest.mark.parametrize("architectures", [None, [], ["BertForPreTraining"], ["EvilModel"]])
def test_a_stated_task_is_taken_where_the_architecture_names_none(bert: Path, architectures: list[str] | None) -> None:
    model = checkpoint.load(with_config(bert, architectures=architectures), task="text-classification")
    assert model.spec.task == "text-classification"


def test_any_checkpoint_gives_features(bert: Path) -> None:
    assert checkpoint.load(bert, task="feature-extraction").spec.task == "feature-extraction"


@pytest.mark.parametrize("architecture", ["BertForPreTraining", "EvilModel", "torch"])
def test_auto_task_of_an_unknown_architecture(bert: Path, architecture: str) -> None:
    with pytest.raises(UsageError, match=f"no task for architecture '{architecture}'; state one of"):
        checkpoint.load(with_config(bert, architectures=[architecture]))


def test_the_inner_layers_of_albert_are_layers(tmp_path: Path) -> None:
    """Passes expect one attention a layer, and refused a model whose groups have two."""
    out = write_tiny(tmp_path / "albert", "albert", extra={"num_hidden_groups": 1, "inner_group_num": 2})
    assert checkpoint.load(out).spec.layers == 4


def test_labels(tiny: Tiny) -> None:
    assert checkpoint.load(tiny("bert")).spec.labels == ("bad", "good", "mixed")
    assert checkpoint.load(tiny("bert", "fill-mask")).spec.labels == ()


@pytest.mark.parametrize("family", ["bert", "roberta", "xlm-roberta", "mpnet", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm"])
def test_all_usable_positions_are_used(tiny: Tiny, family: str) -> None:
    model = checkpoint.load(tiny(family))
    assert model.spec.max_length == 64
    assert all(bool(answer.isfinite().all()) for answer in answers(model, 1, model.spec.max_length))
    with pytest.raises((IndexError, RuntimeError)):
        answers(model, 1, model.spec.max_length + 1)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len", None])
def test_fully_masked_row_is_finite(tiny: Tiny, pooling: str | None) -> None:
    model = checkpoint.load(tiny("bert", "feature-extraction" if pooling else "text-classification", pooling))
    inputs = dict(zip(model.spec.inputs, model.network.example(3, 9), strict=True))
    inputs["attention_mask"][1] = 0
    with torch.inference_mode():
        found = model.network(*inputs.values())
    assert all(bool(answer.isfinite().all()) for answer in found)


def test_a_modernbert_that_classifies_by_the_mean_is_that_of_transformers_and_finite(tmp_path: Path) -> None:
    """transformers divides by the number of tokens, 0 in a fully masked row; every form of such a model was refused for its NaN."""
    import transformers

    out = write_tiny(tmp_path / "model", "modernbert", extra={"classifier_pooling": "mean"})
    model = checkpoint.load(out)
    inputs = dict(zip(model.spec.inputs, model.network.example(3, 9), strict=True))
    inputs["attention_mask"][1] = 0
    inputs["attention_mask"][2, 5:] = 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(out, attn_implementation="eager").eval()
    with torch.inference_mode():
        (found,), expected = model.network(*inputs.values()), theirs(**inputs).logits
    assert bool(found.isfinite().all()) and not bool(expected[1].isfinite().all())
    assert torch.allclose(found[[0, 2]], expected[[0, 2]], atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "nomic_bert"])
def test_another_familys_classifier_reads_the_first_token_whatever_a_stray_field_says(tmp_path: Path, family: str) -> None:
    """`classifier_pooling` belongs to ModernBERT and EuroBERT; transformers keeps it in any configuration and reads it in these alone."""
    plain, stray = (checkpoint.load(write_tiny(tmp_path / name, family, extra=extra)) for name, extra in (("plain", {}), ("stray", {"classifier_pooling": "mean"})))
    inputs = plain.network.example(3, 9)
    with torch.inference_mode():
        (expected,), (found,) = plain.network(*inputs), stray.network(*inputs)
    assert torch.equal(found, expected)
    assert not plain.spec.left_padding_invariant and not stray.spec.left_padding_invariant


# Snapshots


@pytest.mark.parametrize("pooling", ["mean", None])
def test_snapshot_answers_alike_and_holds_no_code_fields(tiny: Tiny, tmp_path: Path, pooling: str | None) -> None:
    original = tiny("bert", "feature-extraction" if pooling else "text-classification", pooling)
    directory = copied(original, tmp_path / "from")
    with_config(directory, auto_map={"AutoModel": "evil.Model"}, _attn_implementation_internal="evil/kernel")
    with_config(directory, "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    (directory / "evil.py").write_text("raise RuntimeError\n")
    out = tmp_path / "to"
    out.mkdir()
    with pytest.warns(UserWarning, match="auto_map"):
        model = checkpoint.load(directory)
    checkpoint.write_snapshot(model, out)

    again = checkpoint.load(out)
    assert again.spec == model.spec
    for got, expected in zip(answers(again), answers(model), strict=True):
        assert torch.allclose(got, expected, atol=1e-6)
    text = "The cat, sat on the mat! " * 30
    assert open_tokenizer(out)(text)["input_ids"] == open_tokenizer(original)(text)["input_ids"]
    for path in out.rglob("*.json"):
        assert "evil" not in path.read_text()
    assert not list(out.rglob("*.py"))
    assert not [path for path in out.rglob("*") if path.is_symlink()]


def test_a_tokenizer_that_transformers_refuses_without_a_word(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(UsageError, match=r"no tokenizer that transformers can load \(no message\)"):
        open_tokenizer(tiny())


@pytest.mark.parametrize(("family", "name"), [("albert", "spiece.model"), ("deberta-v2", "spm.model"), ("xlm-roberta", "sentencepiece.bpe.model"), ("rembert", "sentencepiece.model")])
@pytest.mark.parametrize("missing", [("sentencepiece",), ("protobuf",), ("sentencepiece", "protobuf")])
def test_a_sentencepiece_model_alone_names_the_libraries_to_install(
    family: str, name: str, missing: tuple[str, ...], tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them transformers asks for tiktoken, which would not help."""
    directory = shutil.copytree(tiny(family), tmp_path / "model")
    monkeypatch.setattr(metadata, "distributions", lambda name: [] if name in missing else [object()])
    (directory / name).write_bytes(b"\n\x0e\n\x05<unk>")
    open_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(Unsupported, match=rf"\('{name}'\), .* with {' and '.join(missing)}; pip install {' '.join(missing)}, or save the tokenizer"):
        open_tokenizer(directory)


def test_a_tokenizer_that_runs_in_python_alone_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny("roberta"), tmp_path / "model")
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.txt").write_text("th@@ 5\nthe 4\n")
    (directory / "bpe.codes").write_text("t h 9\nth e</w> 8\n")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertweetTokenizer"}))
    with pytest.raises(Unsupported, match=r"BertweetTokenizer runs in Python alone, .* give a copy of the checkpoint that has one"):
        open_tokenizer(directory)
