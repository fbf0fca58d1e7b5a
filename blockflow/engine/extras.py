"""The optional packages behind each extra of pyproject.toml, and how to install them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from types import MappingProxyType

_PLOTS = ("matplotlib", "scikit-learn")

EXTRAS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "demo": _PLOTS,
        "bench": (*_PLOTS, "mlcommons-loadgen"),
        "onnx": ("onnx", "onnxscript"),
        "onnxruntime": ("onnxruntime",),
        "openvino": ("openvino",),
    }
)


def how_to_install(*extras: str) -> str:
    """The command that brings the packages of these extras, for a hint.

    It names the packages and not ``blockflow[...]``: where BlockFlow runs from a checkout and is
    not installed, pip would take another project of that name from PyPI. And it names this Python:
    ``.venv/bin/blockflow`` runs without an activated environment, where ``pip`` is another one's.
    """
    packages = dict.fromkeys(package for extra in extras for package in EXTRAS[extra])
    python = shlex.quote(sys.executable or "python")
    return f"in the checkout: {python} -m pip install -c constraints.txt {' '.join(packages)}"
