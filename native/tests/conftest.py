"""Small networks of every family, with weights scaled so that attention, biases and norms matter."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import bertopt_native
import numpy as np
import pytest
from numpy.typing import NDArray

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # torch spins while it waits: two test runs on one machine starve each other
ISAS = bertopt_native.supported()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything where the library has no kernel for this CPU."""
    for item in [] if ISAS else items:
        item.add_marker(pytest.mark.skip(reason="this CPU has none of the instruction sets"))


def network(kind: str, seed: int = 0, head: bool = False, **options: Any) -> Any:
    """Return a transformers network in float32, eval mode, with random weights of a size that makes attention uneven; with the `head` of a
    masked language model if asked for."""
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 160, "vocab_size": 300,
        "max_position_embeddings": 80,
        "pad_token_id": 1 if kind in ("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text", "xlm-roberta-xl", "roberta-prelayernorm") else 0,
    }  # fmt: skip
    if kind == "distilbert":
        sizes = {
            "dim": 64,
            "n_heads": 2,
            "n_layers": 3,
            "hidden_dim": 160,
            "vocab_size": 300,
            "max_position_embeddings": 80,
        }
    if kind == "modernbert":  # windows of 8 on each side, in the second and third layer
        sizes |= {"local_attention": 16, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    if kind == "deberta-v2":  # as DeBERTa-v3, in buckets from a distance of 4
        sizes |= {
            "relative_attention": True, "position_biased_input": False, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8,
            "share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0,
        }  # fmt: skip
    if kind == "deberta":  # as microsoft/deberta-base, a row for every distance
        sizes |= {"relative_attention": True, "position_biased_input": False, "pos_att_type": "c2p|p2c", "type_vocab_size": 0}
    if kind == "eurobert":  # two heads of queries share one of keys
        sizes |= {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2, "mask_token_id": 3}
    if kind == "ernie":  # as ERNIE 3.0
        sizes |= {"use_task_id": True, "type_vocab_size": 4}
    if kind == "rembert":  # embeddings wider than the layers, to which they are projected
        sizes |= {"input_embedding_size": 96, "output_embedding_size": 96, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "ultrabert":  # the same, and windows of 5 on each side, in the first two layers
        sizes |= {"num_key_value_heads": 1, "sliding_window": 5}
    if kind == "esm":  # as ESM-2
        sizes |= {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 7, "pad_token_id": 1, "layer_norm_eps": 1e-5}
    if kind in ("gte", "xlm-roberta-xl"):
        sizes["type_vocab_size"] = 2
    if kind in ("electra", "albert", "roformer"):
        sizes["embedding_size"] = 32
    if kind == "albert":
        sizes |= {"num_hidden_groups": 2, "num_hidden_layers": 4, "inner_group_num": 2, "hidden_act": "gelu_new"}
    config = AutoConfig.for_model(kind, **(sizes | options))
    torch.manual_seed(seed)
    model = (AutoModelForMaskedLM if head else AutoModel).from_config(config, attn_implementation="eager").eval().float()
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: Any) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    with torch.no_grad():
        for name, p in model.named_parameters():
            near = any(s in name for s in ("query", "key", ".q.", ".k.", "q_lin", "k_lin", "q_proj", "k_proj", "Wqkv", "in_proj"))
            if "embed_positions" in name:
                continue
            module = name.rpartition(".")[0].rpartition(".")[2]  # not the prefix: roberta_prelayernorm's has a norm in it
            if "norm" in module.lower() or module == "ln":
                p.copy_(1 + 0.2 * draw(p.shape) if name.endswith("weight") else 0.2 * draw(p.shape))
            elif name.endswith("bias") and p.ndim == 1:
                p.copy_((0.5 if near else 0.1) * draw(p.shape))
            elif ("embeddings" in name and "project" not in name) or "embed_tokens" in name:
                p.copy_(0.5 * draw(p.shape))
            elif "relative_attention_bias" in name:
                p.copy_(draw(p.shape))
            else:
                p.copy_((1.5 if near else 0.8) * draw(p.shape) / p.shape[1] ** 0.5)
    return model


def state(model: Any) -> dict[str, NDArray[Any]]:
    """Return the network's tensors as numpy arrays."""
    return {name: t.detach().numpy() for name, t in model.state_dict().items()}


def texts_of(lengths: list[int], vocabulary: int = 300, seed: int = 1) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return ids and starts of random texts without special ids."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(3, vocabulary, sum(lengths)).astype(np.int32)
    return ids, np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def reference(
    model: Any, ids: NDArray[Any], starts: NDArray[Any], token_types: NDArray[Any] | None = None, output: str = "last_hidden_state"
) -> NDArray[np.float32]:
    """Return transformers' last hidden states [T, H], or another `output`, text by text."""
    import torch

    rows = []
    with torch.inference_mode():
        for a, b in pairwise(starts):
            if a == b:
                continue
            given = (
                {}
                if token_types is None
                else {"token_type_ids": torch.tensor(token_types[None, a:b], dtype=torch.long)}
            )
            one = model(
                torch.tensor(ids[None, a:b], dtype=torch.long),
                attention_mask=torch.ones(1, int(b - a), dtype=torch.long),
                **given,
            )
            rows.append(one[output][0].numpy())
    return np.concatenate(rows)


def cosines(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return the cosine of every row."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that packs a small network once and returns the file."""
    folder, known = tmp_path_factory.mktemp("packed"), {}

    def make(kind: str = "bert", precision: Any = "int8", keep: Any = (), **options: Any) -> Path:
        key = repr((kind, precision, keep, options))
        if key not in known:
            model = network(kind, **options)
            known[key] = folder / f"{len(known)}.bin"
            bertopt_native.pack(known[key], model.config.to_dict(), state(model), precision, keep, vocabulary_head=options.get("head", False))
        return known[key]

    return make
