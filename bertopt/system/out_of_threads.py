"""Recognise that no further thread or process may be started, in the words of each library, and say what to do."""

from __future__ import annotations

import re
import threading

from bertopt.errors import ResourceError

#: How Python, OpenBLAS and ONNX Runtime, OpenVINO and Rust's libraries say it.
_SAID = re.compile(r"can't start new thread|pthread_create failed|Resource temporarily unavailable|ThreadPoolBuildError")
#: What to do about it.
REMEDY = "no further thread or process may be started; raise the limit (ulimit -u, the container's limit of processes; ulimit -v, where it is set)"


def said(text: str) -> bool:
    """Return whether a message or a log says it."""
    return _SAID.search(text) is not None


def check(count: int) -> None:
    """Start `count` threads and end them. Raises ResourceError where that is not possible: libraries in C would abort."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise ResourceError(REMEDY) from error
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
