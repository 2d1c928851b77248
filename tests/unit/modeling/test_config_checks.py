"""Configurations that are refused before transformers sees them, and legitimate ones that are not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bertopt.errors import IntegrityError, UsageError
from bertopt.modeling import families, source
from bertopt.modeling.config_checks import check_config, check_shapes, check_size, usable_positions
from tests.support.tiny_models import FAMILIES, NORM_FIRST_FAMILIES, OTHER_FAMILIES, ROTARY_FAMILIES, Tiny

ROOT = Path(__file__).parents[3]
BERT: dict[str, Any] = {
    "model_type": "bert", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "vocab_size": 100, "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0, "layer_norm_eps": 1e-12,
    "id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1},
}  # fmt: skip


@pytest.fixture
def bert(tiny: Tiny, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny("bert"), tmp_path / "bert"))


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES, *ROTARY_FAMILIES, *NORM_FIRST_FAMILIES])
@pytest.mark.parametrize("task", ["feature-extraction", "token-classification"])
def test_real_checkpoints_pass(tiny: Tiny, family: str, task: str) -> None:
    assert usable_positions(source.examine(tiny(family, task))) == 64


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_families_own_defaults_pass(family: str) -> None:
    from transformers import AutoConfig

    without_default = {"vocab_size": 33, "pad_token_id": 1} if family == "esm" else {}
    fields = AutoConfig.for_model(family).to_dict() | without_default
    assert check_config(fields) is fields
    # A checkpoint may leave out whatever has a default.
    check_config({"model_type": family, **without_default})


def test_a_base_model_is_as_large_as_its_weights() -> None:
    base = {**BERT, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
            "vocab_size": 30522, "max_position_embeddings": 512}  # fmt: skip
    check_size(base, 110_000_000)  # one byte a parameter, the smallest there is
    with pytest.raises(IntegrityError, match=r"describes about .* parameters, but the weight files have 9,000,000 bytes"):
        check_size(base, 9_000_000)


@pytest.mark.parametrize(
    "fields",
    [{"model_type": name} for name in ("gpt2", "llama", "t5", "vit", "whisper", "", None, 7, ["bert"], {"a": 1})]
    + [{"is_decoder": True}, {"add_cross_attention": True}, {"quantization_config": {"bits": 4}}],
)  # fmt: skip
def test_what_is_no_encoder(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"encoder|full-precision"):
        check_config({**BERT, **fields})


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size",
                                "max_position_embeddings") for value in ("32", None, 0, -2, 10**9, 1.5, True, [], 10**400)]
    + [("dim", -1), ("n_layers", 10**6), ("type_vocab_size", -1), ("num_labels", 10**9), ("pad_token_id", 100),
       ("pad_token_id", "0"), ("layer_norm_eps", float("nan")), ("layer_norm_eps", -1), ("norm_eps", "small"),
       ("id2label", ["a"]), ("id2label", {"x": "a"}), ("id2label", {str(i): "" for i in range(100_001)}),
       ("label2id", 3), ("num_attention_heads", 3), ("relative_attention_num_buckets", 31)],
)  # fmt: skip
def test_damaged_configurations(name: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match=r"^config.json: .*restore the checkpoint$") as caught:
        check_config({**BERT, name: value})
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "value"), [("use_task_id", "yes"), ("use_task_id", 1), ("use_task_id", None), ("task_type_vocab_size", 0), ("task_type_vocab_size", 10**9)])
def test_damaged_types_of_tasks(name: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match=rf"^config.json: {name} must be .*restore the checkpoint$"):
        check_config({**BERT, "model_type": "ernie", name: value})
    check_config({**BERT, "model_type": "ernie", "use_task_id": True, "task_type_vocab_size": 3})


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "data2vec-text"])
def test_positions_need_the_padding_id_that_they_are_counted_from(family: str) -> None:
    with pytest.raises(IntegrityError, match=r"^config.json: pad_token_id must be a whole number, from which positions are counted; got None; restore"):
        check_config({**BERT, "model_type": family, "pad_token_id": None})
    for fields in ({"model_type": family}, {"model_type": "mpnet", "pad_token_id": None}, {"model_type": "bert", "pad_token_id": None}):
        check_config(fields)


def test_rembert_is_as_large_as_its_weights() -> None:
    """Of the published sizes: embeddings of 256, layers of 1,152."""
    fields = {"model_type": "rembert", "hidden_size": 1152, "num_hidden_layers": 32, "num_attention_heads": 18, "intermediate_size": 4608,
              "vocab_size": 250_300, "max_position_embeddings": 512, "input_embedding_size": 256, "output_embedding_size": 1664}  # fmt: skip
    check_config(fields)
    check_size(fields, 576_000_000)
    with pytest.raises(IntegrityError, match="describes about 361,"):
        check_size(fields, 160_000_000)


@pytest.mark.parametrize("name", ["input_embedding_size", "output_embedding_size"])
@pytest.mark.parametrize("value", [0, None, "256", 10**9])
def test_damaged_widths_of_rembert(name: str, value: Any) -> None:
    with pytest.raises(IntegrityError, match=rf"^config.json: {name} must be a whole number from 1 to 65,536; .*restore the checkpoint$"):
        check_config({**BERT, "model_type": "rembert", name: value})


def test_every_problem_is_named() -> None:
    with pytest.raises(IntegrityError, match=r"hidden_size .*vocab_size .*id2label"):
        check_config({**BERT, "hidden_size": 0, "vocab_size": "x\x1b[31m", "id2label": []})


@pytest.mark.parametrize("content", ["null", "[]", '"x"', "{", "", "[" * 100_000, '{"a": ' + "9" * 5_000 + "}"])
def test_what_is_no_json_object(bert: Path, content: str) -> None:
    (bert / "config.json").write_text(content)
    with pytest.raises(IntegrityError, match=r"config.json'? must be .*restore the checkpoint"):
        source.examine(bert)


def test_a_shape_beyond_the_positions() -> None:
    check_shapes(BERT, [(1, 64)])
    with pytest.raises(UsageError, match=r"at most the model's 64 usable positions; got \[8, 65\]; state shapes that fit, such as \[\[1, 16\], \[8, 64\]\]"):
        check_shapes(BERT, [(1, 8), (8, 65)])
    check_shapes({"model_type": "bert"}, [(1, 10_000)])  # not said: transformers knows


@pytest.mark.parametrize(
    ("missing", "words"),
    [("config.json", "no config.json"), ("model.safetensors", "no model.safetensors"), ("tokenizer.json", "no tokenizer")],
)  # fmt: skip
def test_missing_files(bert: Path, missing: str, words: str) -> None:
    (bert / missing).unlink()
    with pytest.raises(UsageError, match=words):
        source.examine(bert)


@pytest.mark.parametrize("name", ["vocab.txt", "spiece.model", "sentencepiece.model"])
def test_the_tokenizers_file_may_be_its_familys(bert: Path, name: str) -> None:
    (bert / "tokenizer.json").rename(bert / name)
    source.examine(bert)


@pytest.mark.parametrize("other", ["model-best.safetensors", "model.safetensors.incomplete", "model-q8.gguf", "onnx/model.onnx"])
def test_what_lies_there_in_place_of_the_weights_is_named(bert: Path, other: str) -> None:
    (bert / "onnx").mkdir()
    (bert / "model.safetensors").rename(bert / other)
    with pytest.raises(UsageError, match=f"has no model.safetensors, but {other}; give"):
        source.examine(bert)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "vocab.txt", "modules.json"])
def test_a_download_that_broke_off_is_named(bert: Path, name: str) -> None:
    """Of some files it would look as if the checkpoint had none: without its modules it is another model."""
    (bert / name).unlink(missing_ok=True)
    (bert / name).symlink_to("../../blobs/4d7a")
    with pytest.raises(UsageError, match=rf"{name}' is a link to a file that is not there, .*; fetch the model again"):
        source.examine(bert)


def test_a_link_to_nothing_that_nobody_reads_is_let_be(bert: Path) -> None:
    (bert / "README.md").symlink_to("../../blobs/4d7a")
    (bert / "config.json").rename(bert.parent / "blob")
    (bert / "config.json").symlink_to("../blob")
    source.examine(bert)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_no_file(bert: Path, name: str) -> None:
    (bert / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 90868376\n")
    with pytest.raises(IntegrityError, match=f"{name}' is a Git LFS pointer, not the file itself; fetch the file: git lfs pull"):
        source.examine(bert)


@pytest.mark.parametrize("whole", [True, False])
def test_an_adapter_is_no_model(bert: Path, whole: bool) -> None:
    """Beside whole weights too: with peft installed, transformers would load its base model from elsewhere."""
    (bert / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base\x1b", "peft_type": "LORA"}'.replace("\x1b", "\\u001b"))
    if not whole:
        (bert / "config.json").unlink()
    with pytest.raises(UsageError, match=r"is a PEFT adapter for 'org/base\\x1b'; merge the two .*merge_and_unload\(\)"):
        source.examine(bert)


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'])
def test_a_damaged_index(bert: Path, index: str) -> None:
    (bert / "model.safetensors").unlink()
    (bert / "model.safetensors.index.json").write_text(index)
    with pytest.raises(IntegrityError):
        source.examine(bert)


@pytest.mark.parametrize("name", ["x" * 5000, "~nosuchuser/model", "a\0b", "\ud800"])
def test_odd_names_are_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        source.resolve(name)
    assert len(str(caught.value)) < 6000


def test_a_path_that_may_not_be_looked_up_is_no_name_of_the_hub() -> None:
    """As one without permission is: Python 3.14's pathlib says that nothing is there, and the hub was asked."""
    for look in (source.resolve, source.examine_here):
        with pytest.raises(UsageError, match=r"cannot be looked up \(File name too long\); check the path"):
            look("x" * 300)


class Hub:
    """A hub that answers with an error."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self) -> Hub:
        return self

    def repo_info(self, *_: object, **__: object) -> None:
        raise self.error


def answer(code: int) -> Any:
    from unittest.mock import MagicMock

    return MagicMock(status_code=code)


@pytest.mark.parametrize(
    ("kind", "raised", "words"),
    [("RepositoryNotFoundError", UsageError, "the hub has no such model"), ("GatedRepoError", UsageError, "gated"),
     ("RevisionNotFoundError", UsageError, "no revision 'v9'"), ("HfHubHTTPError", UsageError, "could not be fetched")],
)  # fmt: skip
def test_what_the_hub_says(
    kind: str, raised: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.errors

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi", Hub(getattr(huggingface_hub.errors, kind)("no", response=answer(404))))
    with pytest.raises(raised, match=words) as caught:
        source.resolve("nobody/nothing", "v9")
    assert "\n" not in str(caught.value)


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.HfApi", Hub(ConnectionError("[Errno -2] Name or service not known\nmore")))
    with pytest.raises(UsageError, match=r"could not be fetched .*Name or service not known\); check the name and the network"):
        source.resolve("nobody/nothing")


def test_the_checkpoint_lies_one_folder_deeper(tmp_path: Path, bert: Path) -> None:
    shutil.copytree(bert, tmp_path / "package" / "model")
    with pytest.raises(UsageError, match=r"has no config.json; did you mean '.*package/model'\?"):
        source.examine(tmp_path / "package")
    with pytest.raises(UsageError, match="got ''"):
        source.resolve("")


def test_examining_imports_nothing_heavy(bert: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from bertopt.modeling.source import examine;"
        f"examine(Path({str(bert)!r}));"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


