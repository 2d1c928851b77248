"""Half precision for an eager network: weights cast, or autocast around the forward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from bertopt.core import Context, Eager, Pass, Result
from bertopt.errors import Unsupported

if TYPE_CHECKING:
    import torch


class CastHalf(Pass[Eager, Eager]):
    """Cast the encoder to half precision; pooling, normalisation and answers stay float32.

    `cast` halves the weights; `autocast` keeps them in float32 and casts the inputs of matrix products, LayerNorm
    and softmax staying in float32. Counts the tensors cast, or the linear layers autocast.
    """

    dtype: Literal["bfloat16", "float16"] = Field("bfloat16", description="the half-precision type")
    mode: Literal["cast", "autocast"] = Field("cast", description="cast the weights, or the inputs of each product")

    def conflict(self, before: Any) -> str | None:
        if any(isinstance(step, CastHalf) for step in before):
            return "the network is in half precision already"
        return None

    def __call__(self, model: Eager, ctx: Context) -> Result[Eager]:
        if self.dtype == "float16" and ctx.device == "cpu" and not native_fp16():
            raise Unsupported(
                "this CPU has no native fp16 arithmetic, which makes it 100 times slower than float32; use dtype: bfloat16 or device: cuda"
            )
        return model.rewritten(self, precision=self.dtype)

    def rewrite(self, network: torch.nn.Module) -> dict[str, int]:
        import torch

        dtype = getattr(torch, self.dtype)
        encoder: Any = network.encoder
        if self.mode == "autocast":
            network.autocast_dtype = dtype
            return {"linear_layers": sum(isinstance(module, torch.nn.Linear) for module in encoder.modules())}
        tensors = [t for t in (*encoder.parameters(), *encoder.buffers()) if t.is_floating_point() and t.dtype != dtype]
        encoder.to(dtype)
        return {"tensors": len(tensors)}


def native_fp16() -> bool:
    """Whether the CPU computes in fp16 (x86 AVX512-FP16, Arm FPHP), read from /proc/cpuinfo."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    return bool(words & {"avx512_fp16", "fphp", "asimdhp"})
