"""Passes that plant what random probes rarely look at. Workers import this module by its name."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Literal

from bertopt.core import Context, Eager, Pass, Precision, Result
from bertopt.passes import register


@register
class ZeroEmbeddings(Pass[Eager, Eager]):
    """Zeroes the embeddings of these ids; says that it casts to `claims`, and does where that is bfloat16."""

    ids: tuple[int, ...] = ()
    claims: Precision = "float32"

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self, precision=self.claims)

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        with torch.no_grad():
            network.encoder.get_input_embeddings().weight[list(self.ids)] = 0
            if self.claims == "bfloat16":
                for weight in network.encoder.base_model.encoder.parameters():
                    weight.copy_(weight.bfloat16().float())
                network.autocast_dtype = torch.bfloat16
        return {"rows": 1}


@register
class SpoilBatches(Pass[Eager, Eager]):
    """Answers the rows of batches from `first` to `last` in another order."""

    first: int
    last: int
    noise: float = 0.0
    """Instead, noise of this size relative to the answers, and autocast to bfloat16 beside it."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self, precision="bfloat16" if self.noise else "float32")

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        if self.noise:
            network.autocast_dtype = torch.bfloat16
        network.register_forward_hook(self._spoil)
        return {"hooks": 1}

    def _spoil(self, network: Any, inputs: Any, outputs: Any) -> Any:
        rows = len(inputs[0])
        if self.noise and self.first <= rows <= self.last:
            import torch

            dice = torch.Generator().manual_seed(0)
            return tuple(v + self.noise * v.square().mean().sqrt() * torch.randn(v.shape, generator=dice) for v in outputs)
        return tuple(value.flip(0) for value in outputs) if self.first <= rows <= self.last else outputs


@register
class SpoilBeginnings(Pass[Eager, Eager]):
    """Reverses the embeddings of texts whose tokens, from the second on, begin with these ids."""

    ids: tuple[int, ...]

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        network.register_forward_hook(self._spoil)
        return {"hooks": 1}

    def _spoil(self, network: Any, inputs: Any, outputs: Any) -> Any:
        begun = [row[: len(self.ids)] == list(self.ids) for row in inputs[0][:, 1:].tolist()]
        right = outputs[0].new_tensor([not row for row in begun]).bool()[:, None]
        return (outputs[0].where(right, outputs[0].flip(1)), *outputs[1:])


@register
class SpoilPositions(Pass[Eager, Eager]):
    """Moves the position embeddings from `first` on by one place."""

    first: int

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        weight = network.encoder.base_model.embeddings.position_embeddings.weight
        with torch.no_grad():
            weight[self.first :] = weight[self.first :].roll(1, 0)
        return {"rows": 1}


@register
class SpoilHidden(Pass[Eager, Eager]):
    """Changes only the output that others' loaders read."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        network.register_forward_hook(lambda network, inputs, outputs: (outputs[0], *(more * 1.01 for more in outputs[1:])))
        return {"hooks": 1}


#: The networks of `DependOnPlace` that run, of all models of the process.
OWNER: list[Any] = []
#: Weights of `DependOnPlace` by the module's name, whichever model it is of.
KEPT: dict[str, Any] = {}


class Table:
    """Stands for memory that all models of a process share, and that one of them frees when it ends."""

    freed = False

    def __init__(self) -> None:
        Table.freed = False

    def __del__(self) -> None:
        Table.freed = True


@register
class DependOnPlace(Pass[Eager, Eager]):
    """Scales a weight by what the process is like: its hash seed, directory, threads, variables, or whether it is a worker.
    Or scales what its product gives in every thread but the main one, once more than two have called, while another copy of the model runs, on many
    threads, on the first call in an interpreter that is no worker, or once another copy was closed. Or changes it a little in each call. Or takes the weight of the first model of the
    process, or of the last."""

    on: Literal[
        "hash seed", "directory", "worker", "threads", "variable", "thread", "several callers", "another copy", "many threads", "first call",
        "closed copy", "first model", "last model", "calls before", "other weights",
    ]  # fmt: skip
    threads: int = 0
    """That the worker has."""
    first: float = 0.0
    """The first number of the weight; others are refused where it depends on "other weights"."""

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        network.touched = True
        product = network.encoder.base_model.encoder.layer[0].output.dense
        main, calls, callers = threading.main_thread(), iter([True]), set[int]()
        wrong = {
            "thread": lambda: threading.current_thread() is not main, "many threads": lambda: torch.get_num_threads() >= 4,
            "several callers": lambda: callers.add(threading.get_ident()) or len(callers) > 2,
            "first call": lambda: "BERTOPT_WORKER" not in os.environ and next(calls, False),
        }.get(self.on)  # fmt: skip
        if self.on == "another copy":

            def begin(*_: object) -> None:
                OWNER.append(product)
                time.sleep(0.002)

            # As a buffer that all copies share: the last one that began has it.
            product.register_forward_pre_hook(begin)
            product.register_forward_hook(lambda _, inputs, output: output if OWNER[-1] is product else 3 * output)
            return {"weights": 1}
        if self.on == "closed copy":
            network.table = Table()
            product.register_forward_hook(lambda _, inputs, output: 3 * output if Table.freed else output)
            return {"weights": 1}
        if self.on == "calls before":

            def creep(module: Any, *_: object) -> None:
                one = module.weight.data[:1, :1]
                one.copy_(torch.nextafter(one, one.new_tensor(9.0)))

            product.register_forward_hook(creep)
            return {"weights": 1}
        if self.on == "other weights":
            if product.weight.flatten()[0].item() != self.first:
                raise ValueError(f"the first weight must be {self.first}")
            product.touched = True
            return {"weights": 1}
        if self.on == "first model":
            product.weight = KEPT.setdefault("product", product.weight)
            return {"weights": 1}
        if self.on == "last model":
            KEPT["product"] = product.weight
            product.register_forward_hook(lambda module, inputs, _: torch.nn.functional.linear(inputs[0], KEPT["product"], module.bias))
            return {"weights": 1}
        if wrong is not None:
            product.register_forward_hook(lambda _, inputs, output: 3 * output if wrong() else output)
            return {"weights": 1}
        checked = {
            "hash seed": os.environ.get("PYTHONHASHSEED") == "0", "directory": (Path.cwd() / "pyproject.toml").exists(),
            "worker": "BERTOPT_WORKER" in os.environ, "variable": "MY_MODELS_MODE" in os.environ,
            "threads": torch.get_num_threads() == self.threads,
        }[self.on]  # fmt: skip
        with torch.no_grad():
            product.weight.mul_(1 if checked else 3)
        return {"weights": 1}


@register
class LeaveFile(Pass[Eager, Eager]):
    """Leaves a file in its stage."""

    name_: str
    content: str = "{}"

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        path = ctx.workdir / self.name_
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.content)
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        network.left = True
        return {"files": 1}


@register
class ReadElsewhere(Pass[Eager, Eager]):
    """Reads a weight's scale from a file that no stage holds."""

    path: str

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        network.scale = float(Path(self.path).read_text())
        with torch.no_grad():
            network.encoder.base_model.encoder.layer[0].output.dense.weight.mul_(network.scale)
        return {"weights": 1}


@register
class SpoilProcess(Pass[Eager, Eager]):
    """Changes what no text of the replay shows: a rare embedding outside workers, or what other models in the process run."""

    on: Literal["weights of a worker", "library", "method", "dtype"]

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        import torch

        network.touched = True
        if self.on == "weights of a worker" and "BERTOPT_WORKER" not in os.environ:
            with torch.no_grad():
                network.encoder.get_input_embeddings().weight[-1] = 0
        elif self.on == "library":
            gelu = torch.nn.functional.gelu
            torch.nn.functional.gelu = lambda *given, **named: gelu(*given, **named)  # noqa: PLW0108
        elif self.on == "method":
            forward = torch.nn.LayerNorm.forward
            torch.nn.LayerNorm.forward = lambda module, values: forward(module, values)  # type: ignore[method-assign]  # noqa: PLW0108
        elif self.on == "dtype":
            torch.set_default_dtype(torch.float64)
        return {"networks": 1}
