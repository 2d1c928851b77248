"""Tiny random checkpoints: 2 layers, hidden 32, weights scaled so that attention, token types and biases matter."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

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
#: Families whose layers differ: shared ones, relative positions, rotary ones with sliding windows.
OTHER_FAMILIES = (
    "albert", "mpnet", "deberta-v2", "modernbert", "deberta", "ernie", "data2vec-text", "rembert", "ultrabert", "roformer",
)  # fmt: skip
CLASSES = {
    "bert": "Bert", "roberta": "Roberta", "xlm-roberta": "XLMRoberta", "distilbert": "DistilBert", "electra": "Electra",
    "albert": "Albert", "mpnet": "MPNet", "deberta-v2": "DebertaV2", "modernbert": "ModernBert",
    "nomic_bert": "NomicBert", "gte": "Gte", "eurobert": "EuroBert",
    "ernie": "Ernie", "data2vec-text": "Data2VecText", "rembert": "RemBert", "megatron-bert": "MegatronBert", "xlm-roberta-xl": "XLMRobertaXL",
    "ultrabert": "Ultrabert", "esm": "Esm", "deberta": "Deberta", "roformer": "RoFormer",
    "mobilebert": "MobileBert", "convbert": "ConvBert", "squeezebert": "SqueezeBert",
    "roberta-prelayernorm": "RobertaPreLayerNorm",
}  # fmt: skip
#: Families with few of their own ways: rotary positions, and no head for questions.
ROTARY_FAMILIES = ("nomic_bert", "gte", "eurobert", "esm")
#: Families whose tokens read those beside them.
NEIGHBOUR_FAMILIES = ("mobilebert", "convbert")
CONVOLUTION_FAMILIES = (*NEIGHBOUR_FAMILIES, "squeezebert")
#: Families with positions from a table whose norms are of what attention and feed-forward read.
NORM_FIRST_FAMILIES = ("megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm")
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


def tasks_of(family: str) -> tuple[str, ...]:
    """Return the tasks that transformers has a head of the family for."""
    return tuple(task for task in TASKS if task != "question-answering" or family not in ROTARY_FAMILIES)


def write_tiny(
    out: Path, family: str = "bert", task: str = "text-classification", pooling: str | None = None, seed: int = 0,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Path:  # fmt: skip
    """Write a checkpoint directory; with `pooling` ('mean', 'cls', …, 'splade', 'splade_sum_log1p', …) a sentence-transformers one.

    Skips the test where this transformers does not have the family yet. `extra` are further fields of the transformers configuration.
    """
    import torch
    import transformers

    prefix, sparse = CLASSES[family], pooling is not None and pooling.startswith("splade")
    if not hasattr(transformers, f"{prefix}Config"):
        import pytest

        pytest.skip(f"transformers {transformers.__version__} has no {prefix}")
    config = getattr(transformers, f"{prefix}Config")(
        **({"num_labels": 3 if "classification" in task else 2} | _size(family) | dict(extra))
    )
    if "classification" in task and "num_labels" not in extra:
        config.id2label = {0: "bad", 1: "good", 2: "mixed"}
        config.label2id = {label: i for i, label in config.id2label.items()}
    torch.manual_seed(seed)
    model = getattr(transformers, prefix + HEADS["fill-mask" if sparse else task])(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "embed_positions" in name:
                continue  # sines and cosines
            if tensor.dim() > 1 and not name.endswith("bias"):
                # Initialised at 0.02, attention would be uniform and no mask mistake would show. ModernBERT adds its
                # layers to the embeddings without normalising in between, where larger ones would drown them.
                # Its classifier is initialised larger than the rest.
                layers = 4.0
                if family in ("modernbert", "eurobert", "ultrabert"):
                    layers = 1.0 if name.startswith(("classifier", "dense")) else 16.0 if family == "modernbert" else 8.0
                if family in NORM_FIRST_FAMILIES and ".layer." in name:
                    # Where the embeddings are normalised, the stream begins larger.
                    layers = 12.0 if family == "roberta-prelayernorm" and ".output." in name else 8.0
                tensor.mul_(layers if "embeddings" not in name else 10.0)
            else:
                # Initialised biases are 0 and weights of norms 1: one that is lost, or another's, would not show.
                tensor.add_(torch.randn(tensor.shape), alpha=0.1)
        if family == "mobilebert":
            # Published ones have trained without transformers, which would have kept the padding's embedding 0.
            words = model.get_input_embeddings().weight
            words[0].normal_(std=float(words[1:].std()))
        if sparse and model.get_output_embeddings().bias is not None:
            # Of a trained one most weights of a text are 0, but not all.
            largest = model(torch.randint(5, config.vocab_size, (8, 12))).logits.amax(dim=1)
            model.get_output_embeddings().bias.sub_(largest.quantile(0.7))
    model.save_pretrained(out)
    tokenizer(out)
    if sparse:
        modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
                   {"idx": 1, "name": "1", "path": "1_SpladePooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"}]  # fmt: skip
        (out / "modules.json").write_text(json.dumps(modules))
        (out / "1_SpladePooling").mkdir()
        strategy, activation = "sum" if "sum" in str(pooling) else "max", "log1p_relu" if "log1p" in str(pooling) else "relu"
        (out / "1_SpladePooling" / "config.json").write_text(
            json.dumps({"pooling_strategy": strategy, "activation_function": activation, "word_embedding_dimension": config.vocab_size})
        )
        (out / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    elif pooling:
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


def without_normalize(source: Path, out: Path) -> Path:
    """Copy a sentence-transformers checkpoint whose embeddings have length 1 to one whose embeddings have any, and return `out`."""
    shutil.copytree(source, out)
    modules = json.loads((out / "modules.json").read_text())
    (out / "modules.json").write_text(json.dumps([module for module in modules if not module["type"].endswith("Normalize")]))
    return out


def _size(family: str) -> dict[str, Any]:
    """The configuration of 2 layers and 64 usable positions, in the family's own words."""
    size: dict[str, Any] = {"vocab_size": len(VOCABULARY), "pad_token_id": 0}
    if family == "distilbert":
        return size | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "max_position_embeddings": 64}
    size |= {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    # RoBERTa's positions start after the padding index; MPNet's padding index is 1 whatever the configuration says.
    offset = {"roberta": 1, "xlm-roberta": 1, "mpnet": 2, "data2vec-text": 1, "xlm-roberta-xl": 1, "roberta-prelayernorm": 1}.get(family, 0)
    size |= {"max_position_embeddings": 64 + offset}
    if family == "esm":  # as ESM-2
        size |= {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 4, "layer_norm_eps": 1e-5}
    if family in ("electra", "albert"):
        size |= {"embedding_size": 32}
    if family == "ernie":
        # As ERNIE 3.0: a type of task that is added to every token, and more types of tokens than two.
        size |= {"use_task_id": True, "task_type_vocab_size": 3, "type_vocab_size": 4}
    if family == "rembert":
        # Three widths: of the embeddings, the layers, and the head over the vocabulary. The special tokens are in the vocabulary.
        size |= {"input_embedding_size": 64, "output_embedding_size": 96, "bos_token_id": 2, "eos_token_id": 3}
    if family == "squeezebert":
        size |= {"embedding_size": 32}
    if family == "convbert":
        # As the published ones of small size: fewer heads than stated, and a projection of embeddings.
        size |= {"num_attention_heads": 4, "head_ratio": 2, "embedding_size": 16, "conv_kernel_size": 5}
    if family == "mobilebert":
        size |= {"embedding_size": 16, "intra_bottleneck_size": 32, "num_feedforward_networks": 3}
    if family == "deberta-v2":
        # As DeBERTa-v3: relative positions only, in both directions, in buckets, with a key shared with the content.
        size |= {
            "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8, "share_att_key": True, "norm_rel_ebd": "layer_norm", "max_relative_positions": -1,
            "type_vocab_size": 0,
        }  # fmt: skip
    if family == "deberta":
        # As microsoft/deberta-base: relative positions only, in both directions, each distance apart.
        size |= {
            "relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c", "max_relative_positions": -1,
            "type_vocab_size": 0,
        }  # fmt: skip
    if family == "modernbert":
        # A window of 8 tokens, so that the second layer sees less than the first.
        size |= {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}
        size |= {"bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
    if family == "roformer":
        size |= {"embedding_size": 64}
    if family == "ultrabert":
        # A window of 4 tokens on each side, in the second layer; two queries for each key.
        size |= {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"], "num_attention_heads": 4, "num_key_value_heads": 2, "prediction_head_size": 24}
    return size


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


def add_dense(folder: Path, *layers: tuple[int, str], width: int = 32, bias: bool = True) -> Path:
    """Put layers (size, torch's class of activation) between pooling and normalisation of a sentence-transformers directory."""
    import torch
    from safetensors.torch import save_file

    modules = json.loads((folder / "modules.json").read_text())
    generator = torch.Generator().manual_seed(len(layers))
    for number, (size, activation) in enumerate(layers, 2):
        place = folder / f"{number}_Dense"
        place.mkdir()
        fields = {"in_features": width, "out_features": size, "bias": bias, "activation_function": f"torch.nn.modules.activation.{activation}"}
        if activation == "Identity":
            fields["activation_function"] = "torch.nn.modules.linear.Identity"
        (place / "config.json").write_text(json.dumps(fields))
        tensors = {"linear.weight": torch.randn(size, width, generator=generator) / 3, "linear.bias": torch.randn(size, generator=generator) / 3}
        save_file({name: tensor for name, tensor in tensors.items() if bias or name != "linear.bias"}, place / "model.safetensors")
        modules.insert(number, {"path": place.name, "type": "sentence_transformers.models.Dense"})
        width = size
    (folder / "modules.json").write_text(json.dumps([{**module, "idx": number, "name": str(number)} for number, module in enumerate(modules)]))
    return folder
