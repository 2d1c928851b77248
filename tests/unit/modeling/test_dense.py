"""Layers between pooling and normalisation: sentence-transformers' vectors, after every pass, in float32 in every precision."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertopt import stages
from bertopt.core import Context, Eager, Model, Native, Pass
from bertopt.errors import IntegrityError, Unsupported
from bertopt.modeling import checkpoint, fp8, modules_json
from bertopt.passes import (
    BuildNative,
    CastHalf,
    CastOnnxHalf,
    CompileTorch,
    ConvertOpenvino,
    ExportOnnx,
    FuseOrt,
    KeepClsOnly,
    MergeQkv,
    PackSequences,
    QuantizeFp8,
    QuantizeInt8,
    UseSdpa,
)
from bertopt.quantization import openvino_ptq
from bertopt.runtime.predictor import Predictor
from bertopt.runtime.tokenization import Tokenizer
from bertopt.sessions import open_session
from bertopt.stages import certificates, contents
from tests.support.tiny_models import add_dense, write_tiny

TEXTS = ["the cat sat on the mat", "the cat was very good, she ran", "", "a dog " * 20]
TWO = ((24, "Tanh"), (16, "Identity"))


def folder(out: Path, *layers: tuple[int, str], family: str = "bert", pooling: str = "mean", **options: Any) -> Path:
    return add_dense(write_tiny(out, family, "feature-extraction", pooling), *layers, **options)


def vectors(model: Model, directory: Path) -> np.ndarray:
    return np.asarray(Predictor(open_session(model, threads=1), model.spec, directory)(TEXTS))


def theirs(source: Path) -> np.ndarray:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    model = sentence_transformers.SentenceTransformer(str(source), device="cpu", local_files_only=True)
    return np.asarray(model.encode(TEXTS, convert_to_numpy=True))


@pytest.mark.parametrize(
    ("layers", "pooling", "bias"),
    [
        (((24, "Tanh"),), "mean", True), (((24, "Tanh"),), "cls", False), (((40, "GELU"),), "max", True),
        (((24, "ReLU"),), "mean_sqrt_len_tokens", True), (TWO, "mean", True),
    ],
)  # fmt: skip
def test_vectors_are_sentence_transformers_own(layers: Any, pooling: str, bias: bool, tmp_path: Path) -> None:
    source = folder(tmp_path / "model", *layers, pooling=pooling, bias=bias)
    model = checkpoint.load(source)
    assert model.spec.embedding_size == layers[-1][0]
    found = vectors(model, source)
    assert found.shape == (len(TEXTS), layers[-1][0])
    assert np.allclose(found, theirs(source), atol=1e-6)


def test_without_normalisation_too(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", (24, "Identity"))
    modules = json.loads((source / "modules.json").read_text())
    (source / "modules.json").write_text(json.dumps(modules[:-1]))
    found = vectors(checkpoint.load(source), source)
    assert np.allclose(found, theirs(source), atol=1e-5) and np.linalg.norm(found, axis=1).min() > 1.5


def test_parameters_count_them(tmp_path: Path) -> None:
    plain = checkpoint.load(write_tiny(tmp_path / "plain", "bert", "feature-extraction", "mean")).spec
    assert checkpoint.load(folder(tmp_path / "model", (24, "Tanh"))).spec.parameters == plain.parameters + 24 * 33


def test_a_stage_of_the_snapshot_is_the_model_and_hands_the_weights_down(tmp_path: Path) -> None:
    source, parent, child = folder(tmp_path / "model", *TWO), tmp_path / "parent", tmp_path / "child"
    model = checkpoint.load(source)
    parent.mkdir()
    checkpoint.write_snapshot(model, parent)
    stages.write_form(model, parent)
    stages.write_manifest(parent, {"name": "reference", **stages.describe(model)})
    assert np.array_equal(vectors(stages.open_stage(parent), parent), vectors(model, source))
    child.mkdir()
    stages.inherit(parent, child)
    for number in (2, 3):
        name = f"{number}_Dense/model.safetensors"
        assert stages.handed_down(name) and (child / name).read_bytes() == (source / name).read_bytes()
    assert not (child / "model.safetensors").exists()
    stages.write_form(model, child)
    stages.write_manifest(child, {"name": "child", **stages.describe(model)})
    contents.check(stages.read_manifest(parent), stages.read_manifest(child))


SDPA, EXPORT, PACK = UseSdpa(), ExportOnnx(), PackSequences(row_length=64)
LINES: Sequence[tuple[tuple[Pass[Any, Any], ...], float]] = [
    ((SDPA,), 1e-6), ((MergeQkv(),), 1e-6), ((SDPA, CompileTorch()), 1e-6), ((SDPA, PACK), 1e-6), ((SDPA, PackSequences(attention="varlen")), 1e-6),
    ((SDPA, CastHalf()), 0.02), ((SDPA, CastHalf(), QuantizeFp8()), 0.1), ((SDPA, EXPORT), 1e-6), ((SDPA, PACK, EXPORT), 1e-6),
    ((SDPA, EXPORT, FuseOrt(), CastOnnxHalf()), 0.005), ((SDPA, EXPORT, FuseOrt(), QuantizeInt8()), 0.1), ((SDPA, PACK, EXPORT, QuantizeInt8()), 0.1),
    ((SDPA, EXPORT, FuseOrt(), QuantizeInt8(scheme="static")), 0.1), ((SDPA, EXPORT, ConvertOpenvino()), 1e-6),
    ((SDPA, EXPORT, ConvertOpenvino(precision="int8")), 0.1), ((SDPA, EXPORT, ConvertOpenvino(precision="int8", smooth_quant=None)), 0.1),
]  # fmt: skip


def context(source: Path, model: Model, out: Path) -> Context:
    out.mkdir(parents=True)
    tokenizer = Tokenizer(source, model.spec)
    return Context(out, shapes=((1, 8), (4, 24)), texts=tuple(TEXTS[:2] * 6), encode=lambda texts: tokenizer.batch(tokenizer.encode(texts)))


def applied(source: Path, line: Sequence[Pass[Any, Any]], out: Path) -> tuple[Model, Model]:
    """The model after `line`, and its parent."""
    model = parent = checkpoint.load(source)
    for number, each in enumerate(line):
        parent, model = model, each(model, context(source, model, out / str(number))).model
    return model, parent


class Lines:
    """A checkpoint with `TWO` layers and the models after some passes, each built once: nobody may change them."""

    def __init__(self, root: Path) -> None:
        self.root, self.source = root, folder(root / "model", *TWO)
        self.made: dict[tuple[Pass[Any, Any], ...], Model] = {(): checkpoint.load(self.source)}

    def after(self, *line: Pass[Any, Any]) -> Model:
        if line not in self.made:
            parent = self.after(*line[:-1])
            self.made[line] = line[-1](parent, context(self.source, parent, self.root / f"{len(self.made)}")).model
        return self.made[line]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    return Lines(tmp_path_factory.mktemp("lines"))


@pytest.mark.parametrize(("line", "limit"), LINES, ids=lambda value: "-".join(each.name() for each in value) if isinstance(value, tuple) else "")
def test_after_every_pass_they_are_the_same(line: Any, limit: float, lines: Lines) -> None:
    if isinstance(line[-1], QuantizeFp8) and (reason := fp8.cpu_refusal()):
        pytest.skip(reason)
    model, source = lines.after(*line), lines.source
    assert np.abs(vectors(model, source) - vectors(lines.after(), source)).max() <= limit
    found = certificates.certify(model, lines.after(*line[:-1]))
    assert found.status != "contradicted"
    if isinstance(line[-1], ConvertOpenvino | QuantizeInt8 | CastOnnxHalf | ExportOnnx):
        assert found.status == "certified", found.reason


def test_the_first_token_alone_is_enough_for_them(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", *TWO, pooling="cls")
    model, _ = applied(source, (SDPA, KeepClsOnly()), tmp_path / "passes")
    assert np.allclose(vectors(model, source), theirs(source), atol=1e-6)


@pytest.mark.parametrize("packed", [False, True])
def test_int8_leaves_their_products_in_float32(packed: bool, lines: Lines) -> None:
    start = (SDPA, PACK, EXPORT) if packed else (SDPA, EXPORT)
    for last in (QuantizeInt8(), QuantizeInt8(scheme="static")):
        model: Any = lines.after(*start, last)
        session = open_session(model, threads=1)
        effects = last.effects(model, session.facts())
        assert effects == {"products with INT8 weights": (12, 12), "products in integer kernels": (12, 12)}
    model = lines.after(*start, ConvertOpenvino(precision="int8"))
    graph = pytest.importorskip("openvino").Core().read_model(model.path)
    assert (openvino_ptq.int8_products(graph), len(openvino_ptq.products(graph))) == (12, 14)


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len"])
@pytest.mark.parametrize("precision", ["int8", "bf16"])
def test_the_native_encoder_runs_them_in_float32(pooling: str, precision: Any, tmp_path: Path) -> None:
    native = pytest.importorskip("bertopt_native", reason="bertopt-native is not installed: pip install ./native")
    if not native.supported():
        pytest.skip("this CPU has no AVX2")
    source = folder(tmp_path / "model", (24, "Tanh"), (40, "GELU"), pooling=pooling)
    model, parent = applied(source, (BuildNative(precision=precision),), tmp_path / "passes")
    assert isinstance(model, Native) and isinstance(parent, Eager)
    found, reference = vectors(model, source), vectors(checkpoint.load(source), source)
    assert np.abs(found - reference).max() < 0.05 and np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    assert certificates.certify(model, parent).status == "certified"
    predictor = Predictor(open_session(model, threads=1), model.spec, source)
    assert np.array_equal(np.concatenate([np.asarray(predictor([text])) for text in TEXTS]), found)
    with torch.no_grad():
        parent.network.pooling.dense.products[1].weight[3, 4] += 0.01
    assert certificates.certify(model, parent).status == "contradicted"


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"activation_function": "os.system"}, Unsupported, r"activation_function must be torch\.nn's Identity, Tanh, ReLU, GELU; got 'os\.system'"),
        ({"activation_function": "torch.nn.modules.activation.SELU"}, Unsupported, "activation_function must be"),
        ({"use_residual": True}, Unsupported, "use_residual must be False; got True"),
        ({"module_input_name": "token_embeddings"}, Unsupported, "module_input_name must be sentence_embedding"),
        ({"out_features": None}, IntegrityError, "must state out_features"),
        ({"out_features": "24"}, IntegrityError, "out_features must be a whole number"),
        ({"out_features": 23}, IntegrityError, r"must hold linear\.bias \[23\], linear\.weight \[23, 32\]; got linear\.bias \[24\], linear\.weight \[24, 32\]"),
    ],
)
def test_a_configuration_of_another_layer_is_refused(change: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    source = folder(tmp_path / "model", (24, "Tanh"))
    path = source / "2_Dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(error, match=words):
        checkpoint.load(source)


def test_weights_that_are_missing_damaged_or_not_finite_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    source = folder(tmp_path / "model", (24, "Tanh"))
    path = source / "2_Dense" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(IntegrityError, match="is damaged"):
        checkpoint.load(source)
    save_file({"linear.weight": torch.full((24, 32), torch.nan), "linear.bias": torch.zeros(24)}, path)
    with pytest.raises(IntegrityError, match=r"'linear\.weight' must hold finite"):
        checkpoint.load(source)
    save_file({"linear.weight": torch.ones(24, 32, dtype=torch.int32), "linear.bias": torch.zeros(24)}, path)
    with pytest.raises(IntegrityError, match=r"'linear\.weight' must hold finite floating-point"):
        checkpoint.load(source)
    path.unlink()
    with pytest.raises(IntegrityError, match="is missing; fetch"):
        checkpoint.load(source)
    (path.parent / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(IntegrityError, match=r"pytorch_model\.bin, which can run code.*SentenceTransformer\(DIR\)\.save"):
        checkpoint.load(source)


def test_they_follow_pooling_and_precede_normalisation(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", (24, "Tanh"))
    modules = json.loads((source / "modules.json").read_text())
    for order in ((0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3)):
        (source / "modules.json").write_text(json.dumps([modules[number] for number in order]))
        with pytest.raises(Unsupported, match="the order must be Transformer, one Pooling, any Dense, Normalize, or Transformer, SpladePooling; got Transformer, "):
            checkpoint.load(source)


@pytest.mark.parametrize("key", ["name", "path"])
def test_two_layers_of_one_name_or_folder_are_refused(key: str, tmp_path: Path) -> None:
    """sentence-transformers runs one of two modules of one name."""
    source = folder(tmp_path / "model", (32, "Tanh"), (32, "Tanh"))
    modules = json.loads((source / "modules.json").read_text())
    modules[3][key] = modules[2][key]
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Unsupported, match=f"each module must have its own {key}; got "):
        checkpoint.load(source)


def test_what_only_trains_and_folders_without_content_change_nothing(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", (24, "Tanh"))
    modules = json.loads((source / "modules.json").read_text())
    plain = checkpoint.load(source).spec
    modules[-1]["path"] = ""
    (source / "3_Dropout").mkdir()
    (source / "3_Dropout" / "config.json").write_text('{"dropout": 0.2}')
    modules.insert(2, {"idx": 9, "name": "9", "path": "3_Dropout", "type": "sentence_transformers.models.Dropout"})
    (source / "modules.json").write_text(json.dumps(modules))
    assert modules[-1]["type"].endswith("Normalize")
    assert checkpoint.load(source).spec == plain
    assert "3_Dropout/config.json" in modules_json.module_files(source)


def test_a_folder_outside_of_the_checkpoint_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path / "model", (24, "Tanh"))
    shutil.move(source / "2_Dense", tmp_path / "2_Dense")
    modules = json.loads((source / "modules.json").read_text())
    modules[2]["path"] = "../2_Dense"
    (source / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(IntegrityError, match="path must name a folder beside it"):
        checkpoint.load(source)


def test_another_task_of_the_checkpoint_has_none_of_them(tmp_path: Path) -> None:
    """Its head reads the tokens, as transformers has it."""
    source = add_dense(write_tiny(tmp_path / "model", "bert", "fill-mask", "mean"), (24, "Tanh"))
    spec = checkpoint.load(source, "fill-mask").spec
    assert (spec.pooling, spec.dense, spec.normalize, spec.granularity, spec.text_length) == (None, (), False, "token", 48)
