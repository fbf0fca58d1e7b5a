"""Frameworks: import ONNX Runtime and OpenVINO without what they would do beside computing.

Both report usage to their makers by default. ONNX Runtime (1.29 and later) starts an uploading
thread when it is imported, unless ORT_DISABLE_TELEMETRY is set before (onnxruntime/Privacy.md).
OpenVINO's Python package imports its conversion tools and with them openvino_telemetry, which
starts a thread too; nothing of these tools is needed here. A server must not call home unasked, and
a process that is forked from must have one thread.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_TOOLS = "openvino.tools"
_CAPABILITIES = {"bf16": "BF16", "fp16": "FP16"}


def onnxruntime() -> ModuleType:
    """The package, silent. An operator's own ORT_DISABLE_TELEMETRY is left as it is.

    Raises:
        ModuleNotFoundError: the extra is not installed.
    """
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    return import_module("onnxruntime")


def openvino() -> ModuleType:
    """The package without its conversion tools; who wants these can still import them.

    Raises:
        ModuleNotFoundError: the extra is not installed.
    """
    hidden = _TOOLS not in sys.modules
    if hidden:
        # None makes the package's own "try: import" of its tools fail
        sys.modules[_TOOLS] = None  # type: ignore[assignment]
    try:
        return import_module("openvino")
    finally:
        if hidden:
            del sys.modules[_TOOLS]


@cache
def openvino_core() -> Any:
    """This process's one ``openvino.Core``; not to be made before a fork.

    Its CPU plugin gives the thread that loads it a signal stack of its own, for AMX, and takes it
    back when it goes. With several plugins the stack of one that has gone is put back by another
    (2026.4.1), and the next signal ends the process with SIGSEGV.
    """
    return openvino().Core()


def installed(package: str) -> bool:
    """Whether a package can be imported; it is not imported."""
    try:
        return find_spec(package) is not None
    except ValueError:  # in sys.modules without a spec, or blocked there
        return sys.modules.get(package) is not None


def openvino_lacks(precision: str, core: Any | None = None) -> bool:
    """Whether this CPU does not compute in ``precision``: OpenVINO would silently take fp32.

    Args:
        precision: as a topology says it.
        core: an ``openvino.Core``; None = this process's.
    """
    if precision not in _CAPABILITIES:
        return False
    found = (core or openvino_core()).get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    return _CAPABILITIES[precision] not in found
