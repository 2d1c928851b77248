"""Tiny random checkpoints: 2 layers, hidden 32, weights scaled so that attention and token types matter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "not",
    "very",
    "good",
    "bad",
    "film",
    "it",
    "was",
    "is",
    "he",
    "she",
    "they",
    "1",
    "2",
    "3",
    ",",
    ".",
    "!",
    "?",
    "'",
    "-",
]
LETTERS = [*"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz")]
FAMILIES = ("bert", "roberta", "xlm-roberta", "distilbert", "electra")
TASKS = ("feature-extraction", "text-classification", "token-classification", "question-answering", "fill-mask")
HEADS = {
    "feature-extraction": "Model",
    "text-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "fill-mask": "ForMaskedLM",
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCABULARY = [*SPECIAL, *WORDS, *LETTERS]

Tiny = Callable[..., Path]


def write_tiny(
    out: Path, family: str = "bert", task: str = "text-classification", pooling: str | None = None, seed: int = 0
) -> Path:
    """Write a checkpoint directory; with `pooling` ('mean', 'cls', …) a sentence-transformers one."""
    import torch
    import transformers

    prefix = {"bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "distilbert": "DistilBert", "electra": "Electra",
              "albert": "Albert", "mpnet": "MPNet"}[family]  # fmt: skip
    size = {"vocab_size": len(VOCABULARY), "pad_token_id": 0}
    if family == "distilbert":
        size |= {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64}
    else:
        size |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        # RoBERTa's positions start after the padding index.
        size |= {"max_position_embeddings": 65 if family in ("roberta", "xlm-roberta", "mpnet") else 64}
    if family in ("electra", "albert"):
        size["embedding_size"] = 32
    config = getattr(transformers, f"{prefix}Config")(**size, num_labels=3 if "classification" in task else 2)
    if "classification" in task:
        config.id2label = {0: "bad", 1: "good", 2: "mixed"}
        config.label2id = {label: i for i, label in config.id2label.items()}
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + HEADS[task])(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() > 1:
                # Initialised at 0.02, attention would be uniform and no mask mistake would show.
                tensor.mul_(4.0 if "embeddings" not in name else 10.0)
    model.save_pretrained(out)
    tokenizer(out)
    if pooling:
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
                   {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
                   {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]  # fmt: skip
        (out / "modules.json").write_text(json.dumps(modules))
        (out / "1_Pooling").mkdir()
        (out / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 32, "pooling_mode": pooling})
        )
        (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    return out


def tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    fast = Tokenizer(models.WordPiece({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    fast.normalizer = normalizers.BertNormalizer(lowercase=True)
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast.save(str(out / "tokenizer.json"))
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    config = {**names, "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 64}
    (out / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """`tiny(family, task, pooling)`: the directory of a tiny checkpoint, written once a session. Treat it as read-only."""
    made: dict[tuple[object, ...], Path] = {}

    def make(
        family: str = "bert", task: str = "text-classification", pooling: str | None = None, seed: int = 0
    ) -> Path:
        key = (family, task, pooling, seed)
        if key not in made:
            made[key] = write_tiny(tmp_path_factory.mktemp("tiny"), family, task, pooling, seed)
        return made[key]

    return make
