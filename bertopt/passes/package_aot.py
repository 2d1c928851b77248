"""A package that torch compiles ahead of time, so that no compiler is needed where it is served."""

from __future__ import annotations

import copy
import platform
import warnings
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from bertopt.core import Context, Eager, PackageBuild, Packaged, Pass, Result, RuntimeFacts
from bertopt.errors import Unsupported
from bertopt.system import environment, gpu
from bertopt.system.compilers import check_packaging

_BY_TEXT = "on a CPU attention: varlen asks how long each text is, which no exported graph can; use attention: masked"

#: Rows and tokens that are traced. No multiple of 8: where attention of a GPU needs masks aligned to 8, the trace then holds
#: the padding that all other lengths need.
_TRACED = (2, 13)


class PackageAot(Pass[Eager, Packaged]):
    """Compile the network ahead of time with torch.export and AOTInductor. Counts the compiled libraries.

    The package runs batches of any shape, without a compiler and without transformers, on the version of torch, the CPU
    instructions or the compute capability that it was built with, and nowhere else. It is native code.
    """

    incompatible_with: ClassVar[dict[str, str]] = {
        "use_better_transformer": "nn.TransformerEncoder's fast path is torch's own and cannot be exported; branch with after:",
        "capture_graphs": "a package brings its own launches; leave capture_graphs out",
    }

    depends_on_cpu: ClassVar[bool] = True

    def device_conflict(self, device: str, before: Sequence[Pass[Any, Any]]) -> str | None:
        if device == "cpu" and any(getattr(step, "attention", None) == "varlen" for step in before):
            return _BY_TEXT
        return None

    def __call__(self, model: Eager, ctx: Context) -> Result[Packaged]:
        import torch

        from bertopt.modeling.network import UNTUNED

        check_packaging(ctx.device)
        if ctx.device == "cpu" and model.spec.one_row:
            raise Unsupported(_BY_TEXT)
        path = ctx.workdir / "package" / "model.pt2"
        path.parent.mkdir()
        network: Any = copy.deepcopy(model.network).to(ctx.device)
        # Lowering chooses the attention kernels, outside the network's forward.
        with torch.no_grad(), warnings.catch_warnings(), network.attention_kernels(ctx.device):
            warnings.simplefilter("ignore")
            program = torch.export.export(network, network.example(*_TRACED), dynamic_shapes={"tensors": _dynamic(model)})
            torch._inductor.aoti_compile_and_package(program, package_path=str(path), inductor_configs=dict(UNTUNED))
        built = PackageBuild(
            torch=torch.__version__, device=ctx.device, machine=platform.machine(),
            instructions=environment.instructions() if ctx.device == "cpu" else (),
            capability=gpu.capability() if ctx.device == "cuda" else None,
        )  # fmt: skip
        return Result(Packaged(model.spec, model.precision, path, built), {"libraries": _libraries(path)})

    def effects(self, model: Packaged, facts: RuntimeFacts) -> dict[str, tuple[int, int]]:
        return {"compiled library in the package": (1, _libraries(model.path))}


def _dynamic(model: Eager) -> tuple[dict[int, Any], ...]:
    """Dimensions that may be any size, the same one where they have the same name."""
    import torch

    most = {"sequence": model.spec.max_length}
    names = {name for pair in model.spec.dimensions.values() for name in pair}
    dims = {name: torch.export.Dim(name, max=most.get(name)) for name in sorted(names)}
    first = () if model.spec.one_row else (0,)
    return tuple({axis: dims[pair[axis]] for axis in (*first, 1)} for pair in model.spec.dimensions.values())


def _libraries(path: Path) -> int:
    with zipfile.ZipFile(path) as package:
        return sum(name.endswith(".so") for name in package.namelist())
