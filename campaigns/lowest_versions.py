"""Print the lowest versions that pyproject.toml allows, as constraints for pip: `make lowest` runs the tests on them."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

#: Which version each environment takes of these is said elsewhere: torch's builds for CPUs in constraints.txt, and
#: packages for GPUs, clusters and documentation are not part of it.
EXTRAS = ("onnxruntime", "openvino", "serve", "build", "cpu", "metrics", "sign", "traces")
ELSEWHERE = ("torch", "bertopt")


def lowest(project: dict[str, Any]) -> Iterator[str]:
    """Yield `name==version` for each dependency of bertopt and of `EXTRAS`. Raises ValueError for one without a `>=`."""
    stated = [*project["dependencies"], *(text for extra in EXTRAS for text in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, stated):
        if requirement.name not in ELSEWHERE:
            floors = [each.version for each in requirement.specifier if each.operator == ">="]
            if not floors:
                raise ValueError(f"{requirement}: expected a lowest version, as in {requirement.name}>=1.0")
            yield f"{requirement.name}=={floors[0]}"


def main() -> int:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    print("\n".join(lowest(tomllib.loads(pyproject.read_text("utf-8"))["project"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
