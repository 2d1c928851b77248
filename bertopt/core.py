"""All the nouns of bertopt. Read this file first.

A *model* is a value in one *form* (`Eager`, `Compiled`, `Onnx`, `OpenVino`, `Engine`, `Packaged`, `Native`). A *pass* maps one form to
another. A *session* runs one model on one device. `bertopt.results` has the numbers, `bertopt.errors` the errors.
Shapes are written in brackets throughout: B batch, S sequence, H hidden, C classes, V vocabulary.
"""

from __future__ import annotations

import abc
import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from bertopt.errors import PassFailed
from bertopt.precision import HalfRounding as HalfRounding  # noqa: PLC0414  (re-exported: passes know core only)
from bertopt.precision import Int8Rounding as Int8Rounding  # noqa: PLC0414
from bertopt.spec import Granularity as Granularity  # noqa: PLC0414
from bertopt.spec import PackageBuild as PackageBuild  # noqa: PLC0414
from bertopt.spec import Profile as Profile  # noqa: PLC0414
from bertopt.spec import RuntimeFacts as RuntimeFacts  # noqa: PLC0414
from bertopt.spec import ShapeLimits as ShapeLimits  # noqa: PLC0414
from bertopt.spec import Spec as Spec  # noqa: PLC0414
from bertopt.spec import Task as Task  # noqa: PLC0414

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    Array = NDArray[Any]

Device = Literal["cpu", "cuda"]
Precision = Literal["float32", "float16", "bfloat16", "int8", "float8"]


class Rewrite(BaseModel, frozen=True):
    """One recorded pass over an eager network, replayed when the stage is opened."""

    name: str
    """The pass's registered name."""
    options: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model in one form. `precision` is that of the matrix products, which sets the parity limits."""

    spec: Spec
    precision: Precision
    form: ClassVar[str] = "model"

    @property
    def shapes(self) -> ShapeLimits:
        """The [B, S] that the form runs."""
        return ShapeLimits(longest=self.spec.max_length)


@dataclass(frozen=True)
class Eager(Model):
    """A torch network: a checkpoint directory and the rewrites applied to it, in order."""

    checkpoint: Path
    network: torch.nn.Module = field(repr=False)
    rewrites: tuple[Rewrite, ...] = ()
    form: ClassVar[str] = "eager"

    def rewritten(self, by: Pass[Any, Any], precision: Precision | None = None) -> Result[Eager]:
        """Apply `by.rewrite` to a copy of the network and record it, leaving this model untouched."""
        network = copy.deepcopy(self.network)
        changes = by.rewrite(network)
        rewrites, precision = (*self.rewrites, by.record()), precision or self.precision
        return Result(replace(self, network=network, rewrites=rewrites, precision=precision), changes)


@dataclass(frozen=True)
class Compiled(Model):
    """An eager network whose forward is compiled by torch.compile; the last rewrite is the compilation."""

    checkpoint: Path
    network: torch.nn.Module = field(repr=False)
    rewrites: tuple[Rewrite, ...]
    form: ClassVar[str] = "compiled"


@dataclass(frozen=True)
class Onnx(Model):
    """An ONNX graph; weights above 2 GiB are beside it in `model.onnx_data`."""

    path: Path
    form: ClassVar[str] = "onnx"


@dataclass(frozen=True)
class OpenVino(Model):
    """An OpenVINO IR: `path` is the `.xml`; the weights are beside it in the `.bin`."""

    path: Path
    form: ClassVar[str] = "openvino"


@dataclass(frozen=True)
class Native(Model):
    """Weights packed for bertopt-native: `path` is its file; a task head in float32 is beside it in `head.safetensors`."""

    path: Path
    form: ClassVar[str] = "native"


@dataclass(frozen=True)
class Engine(Model):
    """A TensorRT plan for the compute capabilities in `targets` (`sm86`, …).

    `sha256` is the plan's. `driver` and `cuda_version` are those it was built with, None where it was built without a GPU.
    """

    path: Path
    library: str
    version: str
    targets: tuple[str, ...]
    profiles: tuple[Profile, ...]
    sha256: str
    driver: str | None = None
    cuda_version: str | None = None
    cuda_graphs: bool = False
    form: ClassVar[str] = "engine"

    @property
    def shapes(self) -> ShapeLimits:
        longest = max(profile.max[1] for profile in self.profiles)
        return ShapeLimits(longest=min(self.spec.max_length, longest), profiles=self.profiles)


@dataclass(frozen=True)
class Packaged(Model):
    """A library that torch compiled ahead of time, for one version of torch and one kind of processor or GPU."""

    path: Path
    built: PackageBuild
    form: ClassVar[str] = "packaged"


In = TypeVar("In", bound=Model)
Out = TypeVar("Out", bound=Model, covariant=True)


@dataclass(frozen=True)
class Context:
    """What a pass may use. `workdir` is an empty directory for its files."""

    workdir: Path
    device: Device = "cpu"
    shapes: tuple[tuple[int, int], ...] = ((1, 16), (8, 128))
    """The recipe's shape grid [B, S]: what the artefact must accept."""
    texts: tuple[str | tuple[str, str], ...] = ()
    """The recipe's texts, or pairs where it has these and the model takes them, for calibration."""
    seed: int = 0
    encode: Callable[[Sequence[Any]], dict[str, Array]] | None = field(default=None, repr=False)
    """Tokenises texts or pairs as the predictor does, to right-padded int64 arrays [B, S], one for each of `spec.inputs`."""


@dataclass(frozen=True)
class Result(Generic[Out]):
    """The result of a pass: the new model, and how many things of each kind were changed. All zeros is a no-op."""

    model: Out
    changes: dict[str, int]


#: The reserved keys of a recipe step, which no option of a pass may have as its name.
RESERVED_KEYS = ("pass", "name", "after", "limits", "on_fail", "allow_noop", "timeout")


class Pass(BaseModel, Generic[In, Out]):
    """One transformation. The fields are the options, validated when constructed.

    A subclass names its forms, `class ExportOnnx(Pass[Eager, Onnx])`, and implements `__call__`. A pass over eager
    networks puts its work in `rewrite` and returns `model.rewritten(self)`, so that it can be replayed on load.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    #: Whether a result built for a CPU depends on its instructions, so that it is built again on another CPU.
    depends_on_cpu: ClassVar[bool] = False
    #: Names of passes that this one cannot follow, each with the reason for the recipe's author.
    incompatible_with: ClassVar[dict[str, str]] = {}

    @classmethod
    def name(cls) -> str:
        """The class name in snake case: `ExportOnnx` is `export_onnx`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    @classmethod
    def forms(cls) -> tuple[type[Model], type[Model]]:
        """The form taken and the form given, read from `Pass[In, Out]`."""
        for base in cls.__mro__:
            args = getattr(base, "__pydantic_generic_metadata__", {}).get("args", ())
            if len(args) == 2 and all(isinstance(arg, type) for arg in args):
                return args[0], args[1]
        raise TypeError(f"{cls.__name__} must name its forms: class {cls.__name__}(Pass[Eager, Onnx])")

    def record(self) -> Rewrite:
        return Rewrite(name=self.name(), options=self.model_dump(mode="json"))

    def int8_rounding(self) -> Int8Rounding | None:
        """Return how the INT8 products that this pass writes are rounded; None if it writes none."""
        return None

    def half_rounding(self) -> HalfRounding:
        """Return what rounds where this pass makes a model half precision."""
        return "operators"

    def conflict(self, before: Sequence[Pass[Any, Any]]) -> str | None:
        """Return the reason why this pass cannot follow `before` although the form fits, or None.

        `before` are its ancestors, first to last. An override, where options decide, begins with `super().conflict(before)`.
        """
        names = {step.name() for step in before}
        return next((reason for name, reason in self.incompatible_with.items() if name in names), None)

    def shape_conflict(self, shapes: Sequence[tuple[int, int]]) -> str | None:
        """Return the reason why the result cannot run every [B, S] of the recipe's grid, or None."""
        return None

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        """Return the reason why this pass cannot run after `before` on `device` on any machine, or None.

        `device` is 'auto', 'cpu' or 'cuda'. If only some machines cannot run it, that is not a conflict: the pass raises Unsupported there.
        """
        return None

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        """Change `network` in place and count what changed. Only for passes over eager networks."""
        raise PassFailed(f"pass '{self.name()}' must define rewrite(self, network), which changes the network in place and counts what it changed")

    def effects(self, model: Any, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        """Return the counts, expected and seen, that prove on the committed model that this pass took effect.

        Called in a fresh worker on the model reloaded from disk, after the parity check. `facts` describes the session that runs it, and
        names the passes of the stage. A count expected to be 0 shows that nothing was left undone; larger ones show what was done, and if
        none of those is seen, the stage is a no-op.
        """
        return {}

    @abc.abstractmethod
    def __call__(self, model: In, ctx: Context) -> Result[Out]:
        """Build the new model. Raises Unsupported where this machine or this model cannot."""


class Session(abc.ABC):
    """Runs one model on one device. Only `load` and `fetch` copy to and from the device; `step` never does."""

    #: Batches that `run_all` runs at once, and whether several threads may call `run` and `run_all` at once.
    streams: int = 1
    concurrent: bool = False
    #: Whether the device works asynchronously (a GPU): a small batch then takes as long as its launch.
    asynchronous: bool = False
    #: Whether batches are planned by fixed costs instead of measured ones. Where a text's outputs depend on its batch (one activation
    #: scale for all texts, sums in another order), every load then gives the same outputs.
    fixed_costs: bool = False
    #: Texts in packed rows begin at multiples of this many tokens. Where kernels sum over tokens in blocks, a text's outputs are then the
    #: same to the last bit at any place.
    block: int = 1
    #: Token counts for which graphs of one-row batches are captured, ascending; a batch is padded to the next one.
    buckets: tuple[int, ...] = ()

    @abc.abstractmethod
    def load(self, inputs: Mapping[str, Array]) -> None:
        """Put int64 arrays [B, S] on the device, one for each of `spec.inputs`; below a `PackedSession`, of `spec.network_inputs`."""

    @abc.abstractmethod
    def step(self) -> None:
        """Run once on the loaded inputs; return when the device is idle."""

    @abc.abstractmethod
    def fetch(self) -> dict[str, Array]:
        """Return the outputs of the last step, float32, one for each of `spec.outputs`."""

    def run(self, inputs: Mapping[str, Array]) -> dict[str, np.ndarray]:
        self.load(inputs)
        self.step()
        return self.fetch()

    def run_all(self, batches: Iterable[Mapping[str, Array]]) -> Iterator[dict[str, np.ndarray]]:
        """Yield the outputs of each batch, in order.

        Sessions with several streams run that many batches at once, queue as many, and read `batches` while they run.
        """
        for inputs in batches:
            yield self.run(inputs)

    def facts(self) -> RuntimeFacts:
        """Return what runs, as the runtime reports it."""
        return RuntimeFacts()
