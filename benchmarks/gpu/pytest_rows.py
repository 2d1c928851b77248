"""A plugin of pytest: a line of JSON for every test as it ends, so that a run that is cut off has said what it found."""

from __future__ import annotations

import json
from typing import Any

LINE = "test "


def pytest_configure(config: Any) -> None:
    # With pytest-xdist every report comes to the process that started the others, too.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Rows())


class Rows:
    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        row = {"key": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 1)}
        if report.failed:
            row["failure"] = report.longreprtext[-600:]
        print(f"\n{LINE}{json.dumps(row)}", flush=True)
