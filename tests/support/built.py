"""Tiny models after some passes, each made once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch

from bertopt.core import Context, Eager, Pass, Result
from bertopt.modeling import checkpoint
from bertopt.runtime.tokenization import Tokenizer
from tests.support.exports import Exports
from tests.support.tiny_models import Tiny


def apply_passes(model: Eager, *passes: Pass[Any, Any], tmp_path: Path) -> Eager:
    """Return the network after passes over eager ones."""
    for step in passes:
        model = step(model, Context(tmp_path)).model
    return model


class Built:
    """Results by family and the passes applied. Nobody may change their models."""

    def __init__(self, tiny: Tiny, root: Path, export: Exports, texts: Sequence[str] = ()) -> None:
        """Keep files in `root`, which is empty. `texts` are those that passes calibrate on."""
        self.tiny, self.root, self.export, self.texts = tiny, root, export, tuple(texts)
        self._made: dict[tuple[str, tuple[Pass[Any, Any], ...]], Result[Any]] = {}

    @classmethod
    @contextmanager
    def opened(cls, tiny: Tiny, root: Path, export: Exports, texts: Sequence[str] = ()) -> Iterator[Self]:
        """Run torch on one thread until the end, as more only wait for each other on models this small, and then delete `root`."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield cls(tiny, root, export, texts)
        torch.set_num_threads(threads)
        shutil.rmtree(root)

    def context(self, family: str = "bert") -> Context:
        """Return the context of one pass over a model of `family`, with a folder that no other has."""
        workdir = self.root / str(len(list(self.root.iterdir())))
        workdir.mkdir()
        spec = self.build(family).model.spec

        def encode(texts: Sequence[Any]) -> Any:
            tokenizer = Tokenizer(self.tiny(family), spec)
            return tokenizer.batch(tokenizer.encode(texts))

        return Context(workdir, shapes=((2, 8), (3, 16)), texts=self.texts, encode=encode)

    def build(self, family: str, *steps: Pass[Any, Any]) -> Result[Any]:
        """Return the result of the last of `steps`; that of none is the checkpoint."""
        if (family, steps) not in self._made:
            with checkpoint.quiet():
                if steps:
                    parent = self.build(family, *steps[:-1]).model
                    self._made[family, steps] = self.export.apply(steps[-1], parent, self.context(family))
                else:
                    self._made[family, steps] = Result(checkpoint.load(self.tiny(family)), {})
        return self._made[family, steps]
