"""The models, texts and inputs of the GPU benchmark: random weights, invented words, and how passes are applied and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.setting import Missing, Setting, need

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

#: layers, hidden, heads, intermediate of each model; 30,522 words, 512 positions. `tiny` is for a try on a CPU.
MODELS = {
    "bert-base": (12, 768, 12, 3072), "minilm-l6": (6, 384, 12, 1536), "bert-large": (24, 1024, 16, 4096), "tiny": (2, 64, 4, 128),
}  # fmt: skip
VOCABULARY, POSITIONS = 30522, 512


def flops(model: str, batch: int, sequence: int) -> float:
    """Operations of one forward of the encoder: two for each multiplication and addition of its matrix products."""
    layers, hidden, _, wide = MODELS[model]
    tokens = batch * sequence
    return float(layers * tokens * (2 * (4 * hidden * hidden + 2 * hidden * wide) + 4 * sequence * hidden))


def spec(model: str) -> Any:
    from bertopt.core import Spec

    layers, hidden, heads, _ = MODELS[model]
    return Spec(
        family="bert", task="feature-extraction", inputs=("input_ids", "attention_mask", "token_type_ids"),
        outputs=("sentence_embedding",), layers=layers, heads=heads, hidden=hidden, vocabulary=VOCABULARY, token_types=2,
        pad_id=0, max_length=POSITIONS, text_length=POSITIONS, pooling="mean", normalize=True, parameters=0, positions="column",
    )  # fmt: skip


def config(model: str) -> Any:
    import transformers

    layers, hidden, heads, wide = MODELS[model]
    return transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=wide,
        max_position_embeddings=POSITIONS, attn_implementation="eager",
    )  # fmt: skip


def eager(model: str, folder: Path, device: str = "cpu") -> Any:
    """A BERT with mean pooling and seeded random weights, as bertopt's float32 reference; a tokenizer lies in `folder`."""
    need("transformers", "pydantic", "tokenizers")
    import torch
    import transformers

    from bertopt.core import Eager
    from bertopt.modeling.network import Network

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    torch.manual_seed(0)
    with torch.device(device):
        encoder = transformers.BertModel(config(model), add_pooling_layer=False).eval()
    with torch.no_grad():
        for name, tensor in encoder.named_parameters():
            # At its initial 0.02 attention is uniform and hides errors.
            if tensor.dim() > 1 and "embeddings" not in name:
                tensor.mul_(2.0)
    encoder.config.save_pretrained(folder)
    described = spec(model)
    network = Network(encoder, described).eval().requires_grad_(False)
    return Eager(described, "float32", checkpoint=folder, network=network)


def write_tokenizer(folder: Path) -> None:
    """WordPiece over invented words: every word of a text is one token."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(VOCABULARY - 5))]
    fast = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "BertTokenizer", "model_max_length": POSITIONS, "pad_token": "[PAD]", "mask_token": "[MASK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), "utf-8")


def write_sentence_transformer(model: str, folder: Path) -> None:
    """The same model as sentence-transformers saves one; `modules.json` comes last."""
    made = eager(model, folder)
    made.network.encoder.save_pretrained(folder)
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": MODELS[model][1], "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": POSITIONS}), "utf-8")
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")


def sentence_transformer(model: str, folder: Path, device: Any) -> Any:
    """It in sentence-transformers, in bf16 with the attention it chooses."""
    need("sentence_transformers")
    import torch
    from sentence_transformers import SentenceTransformer

    write_sentence_transformer(model, folder)
    return SentenceTransformer(str(folder), device=str(device), local_files_only=True).to(torch.bfloat16).eval()


def apply(
    model: Any, steps: list[tuple[str, dict[str, Any]]], setting: Setting, folder: Path, calibration: Sequence[str] = (),
    encode: Callable[[Sequence[Any]], dict[str, Array]] | None = None,
) -> Any:  # fmt: skip
    """Return `model` after passes named through the registry. Raises Missing where one is not registered or refuses."""
    from pydantic import ValidationError

    from bertopt.core import Context
    from bertopt.errors import Unsupported
    from bertopt.passes import registry

    before: list[Any] = []
    for name, options in steps:
        kind = registry.get(name)
        if kind is None:
            raise Missing(f"pass '{name}' is not registered")
        try:
            step = kind.model_validate(options)
        except ValidationError as error:
            raise Missing(f"pass '{name}' does not take {options}: {error.errors()[0]['msg']}") from error
        if reason := step.conflict(before) or step.device_conflict(setting.device, before):
            raise Missing(f"{name}: {reason}")
        before.append(step)
        work = folder / f"{len(before):02d}-{name}"
        work.mkdir(parents=True, exist_ok=True)
        try:
            context = Context(work, setting.device, ((1, 16), (8, 128)), tuple(calibration), encode=encode)  # type: ignore[arg-type]
            model = step(model, context).model
        except (Unsupported, ImportError) as error:
            raise Missing(f"{name}: {error}") from error
    return model


def open_model(model: Any, device: str) -> Any:
    from bertopt.errors import Unsupported
    from bertopt.sessions import open_session

    try:
        return open_session(model, device)  # type: ignore[arg-type]
    except (Unsupported, ImportError) as error:
        raise Missing(str(error)) from error


def batch(rows: int, tokens: int, seed: int = 0, ragged: bool = False) -> dict[str, Array]:
    """Random ids [rows, tokens]; with `ragged` the texts have every length from a quarter on, padded on the right."""
    import numpy as np

    dice = np.random.default_rng(seed)
    ids = dice.integers(5, VOCABULARY, (rows, tokens), dtype=np.int64)
    mask = np.ones_like(ids)
    if ragged and tokens > 4:
        lengths = np.linspace(max(2, tokens // 4), tokens, rows).astype(int)
        mask = (np.arange(tokens)[None] < lengths[:, None]).astype(np.int64)
    return {"input_ids": ids * mask, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def parity(answers: Array, expected: Array) -> dict[str, float]:
    import numpy as np

    a, b = answers.astype(np.float64), expected.astype(np.float64)
    cosine = (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))
    error = np.linalg.norm(a - b) / np.linalg.norm(b)
    return {"rel_l2": float(error) if math.isfinite(error) else math.inf, "cosine_min": float(np.nan_to_num(cosine, nan=-1).min())}


def lengths(count: int) -> list[int]:
    """Tokens of `count` texts, as committed: 1,024 numbers with the spread of short questions, sentences and passages."""
    known = json.loads((Path(__file__).with_name("lengths.json")).read_text("utf-8"))
    return [known[number % len(known)] for number in range(count)]


def texts(count: int) -> list[str]:
    """Texts of those lengths ([CLS] and [SEP] included) in invented words, all different."""
    import numpy as np

    dice = np.random.default_rng(1)
    return [" ".join(f"w{word}" for word in dice.integers(0, VOCABULARY - 5, max(1, length - 2))) for length in lengths(count)]
