"""Machine: what identifies the hardware and the software that a measurement holds for.

Profiles, choices of an engine and compiled artifacts are good on the machine that they were made
on. The fingerprint changes with whatever moves their figures by more than noise: the processor, its
instruction sets, the number of cores, and the versions of what computes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

ENGINE_PACKAGES = ("torch", "onnxruntime", "openvino")
"""Packages that compute; one that is not installed counts with version ''."""

_ISA_PREFIXES = ("avx", "amx", "sse4", "fma", "f16c", "asimd", "sve", "sme", "bf16", "i8mm", "fp")
"""Of the kernel's long list only what arithmetic libraries choose their code by."""
_NOT_ISA = ("fpu", "fpu_exception", "smep")
_LENGTH = 12
CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, Any]:
    """The facts behind the fingerprint: ``cpu``, ``isa``, ``cores`` and a version per package.

    ``cores`` are the machine's, not those that this process may use: a pinned worker sees the same
    machine as the process that planned it.
    """
    info = _cpuinfo()
    flags = (info.get("flags") or info.get("Features") or "").split()
    isa = sorted(f for f in set(flags) - set(_NOT_ISA) if f.startswith(_ISA_PREFIXES))
    return {
        "cpu": cpu_model(),
        "isa": " ".join(isa),
        "cores": os.cpu_count() or 1,
        **{name: version_of(name) for name in ENGINE_PACKAGES},
    }


@cache
def fingerprint() -> str:
    """Twelve hex digits of :func:`describe`, found once per process."""
    return digest_of(describe())


def digest_of(facts: Mapping[str, Any]) -> str:
    """The fingerprint of a description."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def cpu_model() -> str:
    """The CPU's name as the kernel tells it; else the architecture, with the part's number."""
    info = _cpuinfo()
    parts = (platform.machine(), info.get("CPU implementer", ""), info.get("CPU part", ""))
    return info.get("model name") or " ".join(p for p in parts if p)


def version_of(package: str) -> str:
    """The installed version; '' where the package is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpuinfo() -> dict[str, str]:
    """The first processor's entries; empty where the kernel does not tell."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
