"""Two runs on one output directory wait for each other."""

from __future__ import annotations

import threading
from pathlib import Path

from bertopt.pipeline.store import Store


def test_the_second_run_says_that_it_waits_and_then_goes_on(tmp_path: Path) -> None:
    said, waiting, entered = [], threading.Event(), threading.Event()

    def tell(words: str) -> None:
        said.append(words)
        waiting.set()

    def second() -> None:
        with Store(tmp_path, False, tell):
            entered.set()

    with Store(tmp_path, False, lambda _: None):
        thread = threading.Thread(target=second, daemon=True)
        thread.start()
        assert waiting.wait(30)
        assert not entered.is_set()
    assert entered.wait(30)
    thread.join(30)
    assert said == [f"waiting for another run in {tmp_path}"]
