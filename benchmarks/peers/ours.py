"""How an artefact of this project is opened: as a user would, with `bertopt.load`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import bertopt


def _sparse(answers: Sequence[Any], vocabulary: int) -> Any:
    """A sparse tensor [N, V], as sentence-transformers gives."""
    import numpy as np
    import torch

    rows = np.repeat(np.arange(len(answers)), [len(answer["indices"]) for answer in answers])
    columns, values = (np.concatenate([answer[part] for answer in answers]) for part in ("indices", "values"))
    places = torch.from_numpy(np.stack([rows, columns.astype(np.int64)]))
    return torch.sparse_coo_tensor(places, torch.from_numpy(values.astype(np.float32)), (len(answers), vocabulary))


def load(options: dict[str, Any]) -> tuple[Callable[[Sequence[str]], Any], dict[str, Any]]:
    """Texts to vectors [N, H], or to labels."""
    arguments = {name: options[name] for name in ("threads", "streams") if options.get(name)}
    known = inspect.signature(bertopt.load).parameters
    predictor = bertopt.load(options["directory"], **{k: v for k, v in arguments.items() if k in known})

    def answer(texts: Sequence[str]) -> Any:
        found = predictor(list(texts))
        if predictor.spec.sparse:
            return _sparse(found, predictor.spec.vocabulary)
        return [one["label"] for one in found] if isinstance(found, list) else found

    return answer, {"runtime": predictor.session.facts().model_dump(exclude_none=True), "spec": predictor.spec.model_dump(mode="json")}
