from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYOUT_VERSION: int

class BadFile(ValueError): ...
class Unsupported(RuntimeError): ...

class Encoder:
    def __init__(self, path: str, threads: int, isa: str, huge_pages: bool) -> None: ...
    def run(
        self,
        ids: NDArray[np.int32],
        starts: NDArray[np.int64],
        token_types: NDArray[np.int32] | None,
        positions: NDArray[np.int32] | None,
        output: int,
        normalize: bool,
    ) -> NDArray[np.float32]: ...
    def info(self) -> dict[str, Any]: ...

def isa(name: str = "") -> str: ...
def supported() -> list[str]: ...
def int8_product(a: NDArray[np.uint8], packed: NDArray[np.int8], isa: str = "") -> NDArray[np.int32]: ...

