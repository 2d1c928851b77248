"""Folders of sentence-transformers: what their files say beside the weights. The vectors are its own."""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt.errors import CheckpointWarning, IntegrityError, Unsupported, UsageError
from bertopt.modeling import checkpoint
from bertopt.modeling.source import examine
from bertopt.runtime.predictor import Predictor
from bertopt.sessions import open_session
from tests.support.tiny_models import Tiny, write_tiny

TEXTS = ["the cat sat on the mat", "The CAT was Very Good, she ran", "a dog " * 20]


@pytest.fixture
def folder(tiny: Tiny, tmp_path: Path) -> Path:
    """A tiny model with mean pooling of one's own."""
    shutil.copytree(tiny("bert", "feature-extraction", "mean"), tmp_path / "model")
    return tmp_path / "model"


def edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | fields))


def opened(source: Path, out: Path) -> Predictor:
    """A stage that holds nothing but the snapshot of `source`."""
    out.mkdir()
    checkpoint.write_snapshot(checkpoint.load(source), out)
    model = checkpoint.load(out)
    return Predictor(open_session(model), model.spec, out)


def vectors(source: Path, out: Path) -> np.ndarray:
    return np.asarray(opened(source, out)(TEXTS))


def theirs(source: Path, **options: Any) -> np.ndarray:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(source), device="cpu", local_files_only=True)
    return np.asarray(model.encode(TEXTS, convert_to_numpy=True, **options))


@pytest.mark.parametrize("kind", ["roberta", "distilbert", "xlm-roberta"])
def test_settings_under_their_older_names_count(folder: Path, tmp_path: Path, kind: str) -> None:
    (folder / "sentence_bert_config.json").rename(folder / f"sentence_{kind}_config.json")
    edited(folder / f"sentence_{kind}_config.json", max_seq_length=12)
    assert checkpoint.load(folder).spec.text_length == 12
    assert np.allclose(vectors(folder, tmp_path / "out"), theirs(folder), atol=1e-6)


def test_lower_case_is_put_into_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(content))
    cased = theirs(folder)
    edited(folder / "sentence_bert_config.json", do_lower_case=True)
    found = vectors(folder, tmp_path / "out")
    assert np.allclose(found, theirs(folder), atol=1e-6) and not np.allclose(found, cased, atol=1e-2)
    # The artefact's own files say it once more, which changes nothing.
    assert np.allclose(found, theirs(tmp_path / "out"), atol=1e-6)


@pytest.mark.parametrize("path", ["pooling", "./pooling", "pooling/"])
def test_the_pooling_may_be_in_any_folder(folder: Path, tmp_path: Path, path: str) -> None:
    (folder / "1_Pooling").rename(folder / "pooling")
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    assert np.allclose(vectors(folder, tmp_path / "out"), theirs(folder), atol=1e-6)


@pytest.mark.parametrize("path", ["../model/1_Pooling", "..", "", "/etc", 3])
def test_a_pooling_outside_the_folder_is_refused(folder: Path, path: Any) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = path
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(IntegrityError, match="path must name a folder beside it"):
        checkpoint.load(folder)


@pytest.mark.parametrize("content", [{"a": 1}, ["x"], [{"type": "x.Transformer"}]])
def test_modules_that_are_none_are_named(folder: Path, content: Any) -> None:
    (folder / "modules.json").write_text(json.dumps(content))
    with pytest.raises(IntegrityError, match=r"modules\.json must be a list of modules"):
        checkpoint.load(folder)


@pytest.mark.parametrize("order", [(0, 2, 1), (0, 1, 1)])
def test_modules_in_another_order_are_refused(folder: Path, order: tuple[int, ...]) -> None:
    """Normalize before Pooling leaves vectors of any length."""
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([modules[i] for i in order]))
    with pytest.raises(Unsupported, match="the order must be Transformer, one Pooling, any Dense, Normalize, or Transformer, SpladePooling; got Transformer, "):
        checkpoint.load(folder)


def test_a_normalisation_of_something_else_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "2_Normalize").mkdir()
    edited(folder / "2_Normalize" / "config.json", module_input_name="sentence_embedding", module_output_name="sentence_embedding")
    assert np.allclose(vectors(folder, tmp_path / "out"), theirs(folder), atol=1e-6)
    edited(folder / "2_Normalize" / "config.json", module_input_name="token_embeddings", module_output_name="token_embeddings")
    with pytest.raises(Unsupported, match="2_Normalize: module_input_name must be sentence_embedding; got 'token_embeddings'"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"modality_config": {"text": {"method": "forward", "method_output_name": ["hidden_states", -2]}}}, r"method_output_name must be last_hidden_state; got \['hidden_states', -2\]"),
        ({"modality_config": {"text": {"method": "forward", "method_output_name": "pooler_output"}}}, "method_output_name must be last_hidden_state; got 'pooler_output'"),
        ({"modality_config": {"text": {"method": "get_text_features", "method_output_name": "last_hidden_state"}}}, "method must be forward; got 'get_text_features'"),
        ({"modality_config": {"image": {"method": "forward", "method_output_name": "last_hidden_state"}}}, "method must be forward; got None"),
        ({"module_output_name": "sentence_embedding"}, "module_output_name must be token_embeddings; got 'sentence_embedding'"),
        ({"transformer_task": "fill-mask"}, "transformer_task must be feature-extraction or sequence-classification; got 'fill-mask'"),
    ],
)  # fmt: skip
def test_a_transformer_that_gives_something_else_than_its_last_layer_is_refused(folder: Path, settings: dict[str, Any], words: str) -> None:
    edited(folder / "sentence_bert_config.json", **settings)
    with pytest.raises(Unsupported, match=rf"^sentence_bert_config\.json: .*{words}"):
        checkpoint.load(folder)


def test_what_newer_versions_say_of_the_transformer_as_it_is_changes_nothing(folder: Path, tmp_path: Path) -> None:
    text = {"text": {"method": "forward", "method_output_name": "last_hidden_state"}}
    settings = {"transformer_task": "feature-extraction", "modality_config": text, "module_output_name": "token_embeddings"}
    edited(folder / "sentence_bert_config.json", **settings)
    assert np.allclose(vectors(folder, tmp_path / "out"), theirs(folder), atol=1e-6)


def test_a_re_ranker_saved_by_newer_versions_opens(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", extra={"num_labels": 1})
    (model / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]))
    text = {"text": {"method": "forward", "method_output_name": "logits"}}
    edited(model / "sentence_bert_config.json", transformer_task="sequence-classification", modality_config=text, module_output_name="scores")
    assert checkpoint.load(model).spec.ranks


def test_the_classifier_of_setfit_is_named(folder: Path) -> None:
    (folder / "model_head.pkl").write_bytes(b"")
    with pytest.warns(CheckpointWarning, match=r"model_head\.pkl: .* SetFit's classifier"):
        checkpoint.load(folder)


def test_a_default_prompt_is_named(folder: Path) -> None:
    prompts = {"query": "the cat: ", "document": ""}
    edited(folder / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="query")
    with pytest.warns(UserWarning, match=r"puts no prompt before a text by default: give prompt_name='query'"):
        checkpoint.load(folder)
    edited(folder / "1_Pooling" / "config.json", include_prompt=False)
    with pytest.warns(UserWarning, match=r"an artefact cannot put a prompt before a text, since .* leaves prompts out \(include_prompt: false\): its vectors are those of"):
        checkpoint.load(folder)


def test_the_default_prompt_of_a_cross_encoder_is_named_with_what_to_do(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", extra={"num_labels": 1})
    (model / "modules.json").write_text(json.dumps([{"path": "", "type": "sentence_transformers.base.modules.transformer.Transformer"}]))
    edited(model / "config_sentence_transformers.json", model_type="CrossEncoder", prompts={"query": "the cat: "}, default_prompt_name="query")
    with pytest.warns(UserWarning, match=r"by default: put 'the cat: ' before the first text of each pair yourself"):
        checkpoint.load(model)


PROMPTS = {"query": "the cat: ", "document": "", "odd": 3, "broken": "\ud800", "\ud800": "broken"}


def test_a_prompt_is_put_before_every_text_that_is_given_its_name(folder: Path, tmp_path: Path) -> None:
    edited(folder / "config_sentence_transformers.json", prompts={**PROMPTS, "odd": "é "})
    predict = opened(folder, tmp_path / "out")
    for name in ("query", "document", "odd"):
        found = predict(TEXTS, prompt_name=name)
        assert np.allclose(found, theirs(folder, prompt_name=name), atol=1e-6)
        assert np.array_equal(found, np.stack(list(predict.stream(TEXTS, prompt_name=name))))
    assert not np.allclose(predict(TEXTS, prompt_name="query"), predict(TEXTS), atol=1e-3)
    assert np.array_equal(predict(TEXTS[:1], prompt_name="query"), predict([PROMPTS["query"] + TEXTS[0]]))
    # Without prompt_name no prompt is added, whatever sentence-transformers adds by default.
    assert np.allclose(predict(TEXTS), theirs(folder, prompt=""), atol=1e-6)


def test_what_no_prompt_goes_with_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompt 'query'; it has no prompts: put one before the text"):
        opened(folder, tmp_path / "none")(TEXTS, prompt_name="query")
    edited(folder / "config_sentence_transformers.json", prompts=PROMPTS)
    predict = opened(folder, tmp_path / "out")
    with pytest.raises(UsageError, match=r"no prompt 'passage'; its prompts are 'query', 'document'$"):
        predict(TEXTS, prompt_name="passage")
    with pytest.raises(UsageError, match="no prompt 'passage'"):
        predict.stream(TEXTS, prompt_name="passage")
    with pytest.raises(UsageError, match=r"texts\[1\] is a pair"):
        predict(["a", ("a", "b")], prompt_name="query")


def test_no_prompt_is_offered_where_the_pooling_leaves_it_out(folder: Path, tmp_path: Path) -> None:
    """Means over the text alone are another model than the one that was checked."""
    edited(folder / "config_sentence_transformers.json", prompts=PROMPTS)
    edited(folder / "1_Pooling" / "config.json", include_prompt=False)
    predict = opened(folder, tmp_path / "out")
    assert predict.prompts == {}
    # To put it before the text by hand, as models without prompts are told, would give vectors that no one else has.
    with pytest.raises(UsageError, match=r"^prompt_name: an artefact cannot put a prompt .* leaves prompts out .*: leave prompt_name out, or use"):
        predict(TEXTS, prompt_name="query")


def test_dimensions_that_are_cut_off_are_named(folder: Path) -> None:
    edited(folder / "config_sentence_transformers.json", truncate_dim=16)
    with pytest.warns(UserWarning, match=r"dropped truncate_dim 16.*take the first 16 numbers"):
        checkpoint.load(folder)


IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"


@pytest.mark.parametrize(
    ("stated", "newer", "named"),
    [
        ({"sentence_transformers": {"activation_fn": IDENTITY, "version": "5.0"}}, None, "Identity"),
        ({"sbert_ce_default_activation_function": IDENTITY}, None, "Identity"),
        ({"sbert_ce_default_activation_function": SIGMOID}, None, None), ({}, None, None),
        # Where a new version states it, the older statement does not count.
        ({}, IDENTITY, "Identity"), ({"sbert_ce_default_activation_function": IDENTITY}, SIGMOID, None), ({}, SIGMOID, None),
        # Of a regression an artefact gives the value itself.
        ({"problem_type": "regression"}, IDENTITY, None), ({"problem_type": "regression"}, SIGMOID, "Sigmoid"),
    ],
)  # fmt: skip
def test_scores_that_are_not_cross_encoder_s_are_named(stated: dict[str, Any], newer: str | None, named: str | None, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "model", extra={"num_labels": 1})
    edited(model / "config.json", **stated)
    if newer is not None:
        edited(model / "config_sentence_transformers.json", activation_fn=newer)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        checkpoint.load(model)
    said = [str(each.message) for each in seen if "CrossEncoder" in str(each.message)]
    assert len(said) == (named is not None) and all(f"scores by '{named}'" in each and "predictor.logits" in each for each in said)


def test_the_longest_text_is_sentence_transformers_own_also_where_the_tokenizer_s_is_shorter(folder: Path, tmp_path: Path) -> None:
    edited(folder / "tokenizer_config.json", model_max_length=8)
    assert checkpoint.load(folder).spec.text_length == 48
    assert np.allclose(vectors(folder, tmp_path / "out"), theirs(folder), atol=1e-6)
    edited(folder / "sentence_bert_config.json", max_seq_length=None)
    assert checkpoint.load(folder).spec.text_length == 8


@pytest.mark.parametrize("key", ["tokenizer_args", "processor_kwargs"])
def test_the_longest_text_may_be_an_option_of_the_tokenizer(folder: Path, tmp_path: Path, key: str) -> None:
    edited(folder / "sentence_bert_config.json", **{key: {"model_max_length": 8}})
    assert checkpoint.load(folder).spec.text_length == 8
    assert np.allclose(vectors(folder, tmp_path / "out"), theirs(folder), atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"model_args": {"attention": "x"}}, "model_args.attention"), ({"processing_kwargs": {"text": {"max_length": 8}}}, "processing_kwargs.text"),
        ({"query_length": 8, "document_length": 16}, "query_length, document_length"), ({"query_expansion": {"length": 8}}, "query_expansion"),
    ],
)  # fmt: skip
def test_options_that_are_not_read_are_named(folder: Path, settings: dict[str, Any], named: str) -> None:
    edited(folder / "sentence_bert_config.json", **settings)
    with pytest.warns(UserWarning, match=f"does not read '{re.escape(named)}'"):
        checkpoint.load(folder)


def test_settings_that_say_nothing_are_not_named(folder: Path) -> None:
    edited(folder / "sentence_bert_config.json", query_length=None, document_length=None, query_expansion=None, processing_kwargs={})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(folder)


def test_a_transformer_in_another_folder_says_how_to_save_it(folder: Path) -> None:
    """Given that folder alone, bertopt would take the model without its pooling."""
    (folder / "0_Transformer").mkdir()
    (folder / "config.json").rename(folder / "0_Transformer" / "config.json")
    with pytest.raises(UsageError, match=r"in '0_Transformer'.*SentenceTransformer"):
        examine(folder)


def test_a_folder_that_was_not_fetched(folder: Path) -> None:
    shutil.rmtree(folder / "1_Pooling")
    with pytest.raises(IntegrityError, match=r"1_Pooling/config.json' is not there; restore the checkpoint"):
        checkpoint.load(folder)


# Pooling


def pooled(hidden: torch.Tensor, mask: torch.Tensor, mode: str) -> torch.Tensor:
    """Row by row, as sentence-transformers defines the modes."""
    rows = []
    for vectors, valid in zip(hidden, mask.bool(), strict=True):
        found = vectors[valid]
        rows.append(
            {
                "cls": vectors[0], "mean": found.mean(0), "max": found.amax(0),
                "mean_sqrt_len": found.sum(0) / math.sqrt(len(found)),
            }[mode]
        )  # fmt: skip
    return torch.stack(rows)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "max", "mean_sqrt_len"])
def test_pooling(folder: Path, mode: str, normalize: bool) -> None:
    old_style = {f"pooling_mode_{name}_tokens": name == mode for name in ("cls", "mean", "max")}
    old_style = {key.replace("cls_tokens", "cls_token"): value for key, value in old_style.items()}
    old_style["pooling_mode_mean_sqrt_len_tokens"] = mode == "mean_sqrt_len"
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **old_style}))
    if not normalize:
        modules = json.loads((folder / "modules.json").read_text())
        (folder / "modules.json").write_text(json.dumps(modules[:2]))
    model = checkpoint.load(folder)
    assert (model.spec.pooling, model.spec.normalize, model.spec.task) == (mode, normalize, "feature-extraction")
    assert (model.spec.outputs, model.spec.granularity) == (("sentence_embedding",), "text")
    example = model.network.example(3, 9)
    with torch.no_grad():
        (embedding,) = model.network(*example)
        hidden = model.network.base(**dict(zip(model.network.inputs, example, strict=True))).last_hidden_state
    expected = pooled(hidden, example[1], mode)
    if normalize:
        expected = torch.nn.functional.normalize(expected, dim=1)
        assert torch.allclose(embedding.norm(dim=1), torch.ones(3))
    assert torch.allclose(embedding, expected, atol=1e-6)


def test_new_style_pooling_config_and_text_length(tiny: Tiny) -> None:
    spec = checkpoint.load(tiny("bert", "feature-extraction", "cls")).spec
    assert (spec.pooling, spec.text_length, spec.max_length) == ("cls", 48, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling_mode": "lasttoken"},
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode_weightedmean_tokens": True},
    ],
)
def test_other_pooling_is_unsupported(folder: Path, fields: dict[str, Any]) -> None:
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(fields))
    with pytest.raises(Unsupported, match="mode must be one of cls, mean, max, mean_sqrt_len"):
        checkpoint.load(folder)


def test_another_module_is_unsupported(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"idx": 3, "name": "3", "path": "3_LayerNorm", "type": "sentence_transformers.models.LayerNorm"})
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Unsupported, match=r"got LayerNorm at '3_LayerNorm'.*without modules.json"):
        checkpoint.load(folder)
