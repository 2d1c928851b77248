"""Families whose tokens read the tokens beside them, which transformers lets read padding. B rows, S tokens, E embedding size.

A text's answer is that of the text alone, without padding, where nothing is beside its first and its last token. In a padded batch
transformers gives another one (docs/decisions/022). Here a token that the mask leaves out is nothing to the tokens beside it either.
"""

from __future__ import annotations

from typing import Any

import torch

FAMILIES = ("mobilebert", "convbert")


def reads_padding(config: Any) -> bool:
    """Whether transformers' network lets tokens read the padding beside them."""
    return config.model_type == "convbert" or (config.model_type == "mobilebert" and bool(config.trigram_input))


def without_padding(base: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the base model is to be given in place of `inputs`, of rows of one text.

    MobileBERT puts the embeddings of the tokens before and after beside each token's own: those of masked tokens are made 0 here, as
    transformers has them before and behind the row. Nothing else of a masked token reaches the others.
    """
    if base.config.model_type != "mobilebert" or not reads_padding(base.config):
        return inputs
    words = base.get_input_embeddings()(inputs["input_ids"])
    others = {name: tensor for name, tensor in inputs.items() if name != "input_ids"}
    return {**others, "inputs_embeds": words * inputs["attention_mask"].unsqueeze(-1).to(words.dtype)}


def prepare(base: Any) -> None:
    """Fit a base model, whose weights were loaded, for every pass: a ConvBERT's convolutions read nothing of masked tokens, and a MobileBERT's
    embeddings are a graph for every length."""
    if base.config.model_type == "convbert":
        from bertopt.modeling import span_attention

        span_attention.install(base)
    elif reads_padding(base.config):
        from bertopt.modeling.trigrams import TrigramEmbeddings

        base.embeddings = TrigramEmbeddings(base.embeddings).train(base.embeddings.training)
