"""Sub-interpreters, in which extension modules wait for ever for the lock of the main interpreter."""

from __future__ import annotations

import ctypes

from bertopt.errors import Unsupported


def refuse() -> None:
    """Raise Unsupported in a sub-interpreter, as mod_wsgi starts one for each application."""
    here, main = ctypes.pythonapi.PyInterpreterState_Get, ctypes.pythonapi.PyInterpreterState_Main
    here.restype = main.restype = ctypes.c_void_p
    if here() != main():
        raise Unsupported(
            "an artefact cannot be opened in a sub-interpreter, where its libraries wait for ever; open it in the main one: with mod_wsgi, set "
            "WSGIApplicationGroup %{GLOBAL}"
        )
