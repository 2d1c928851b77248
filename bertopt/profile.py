"""An optimisation profile: the shapes an engine accepts."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


class Profile(BaseModel):
    """One optimisation profile of an engine: the [B, S] shapes it accepts, and the one it is tuned for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min: tuple[int, int] = (1, 1)
    opt: tuple[int, int] = (8, 128)
    max: tuple[int, int] = (32, 512)

    @model_validator(mode="after")
    def _ordered(self) -> Profile:
        for axis, name in enumerate(("batch", "sequence")):
            if not 1 <= self.min[axis] <= self.opt[axis] <= self.max[axis]:
                raise ValueError(
                    f"{name} must satisfy 1 <= min <= opt <= max; got {self.min[axis]}, {self.opt[axis]}, {self.max[axis]}"
                )
        return self

    def accepts(self, batch: int, sequence: int) -> bool:
        return self.min[0] <= batch <= self.max[0] and self.min[1] <= sequence <= self.max[1]
