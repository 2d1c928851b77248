"""Run artefacts: `bertopt.load` and the predictor."""
