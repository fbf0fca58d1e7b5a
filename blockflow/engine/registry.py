"""Which engine loads which artifact format: one line per engine.

An engine's module is imported when its format is first asked for, so that ``echo`` needs no
framework and a missing optional package hurts only those who use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from blockflow.core.errors import RepositoryError, SystemError_
from blockflow.core.model import BlockInfo
from blockflow.engine.base import Engine, EngineOptions

ENGINES: Mapping[str, str] = {
    "pt2": "blockflow.engine.exported:ExportedEngine",
    "torchscript-scripted": "blockflow.engine.torchscript:TorchScriptEngine",
    "torchscript-traced": "blockflow.engine.torchscript:TorchScriptEngine",
    "echo": "blockflow.engine.echo:EchoEngine",
}
"""Artifact format -> ``module:class``."""


def create_engine(block: BlockInfo, options: EngineOptions) -> Engine:
    """Make the engine for a block; nothing is loaded yet.

    Raises:
        RepositoryError: UNSUPPORTED_FORMAT.
        SystemError_: MISSING_EXTRA when the engine's framework is not installed.
    """
    target = ENGINES.get(block.format)
    if target is None:
        raise RepositoryError(
            "UNSUPPORTED_FORMAT",
            f"no engine loads format {block.format!r}",
            where=block.name,
            hint=f"known formats: {', '.join(ENGINES)}",
        )
    module, _, name = target.partition(":")
    try:
        cls = getattr(import_module(module), name)
    except ModuleNotFoundError as e:
        raise SystemError_(
            "MISSING_EXTRA",
            f"format {block.format!r} needs the package {e.name!r}",
            where=block.name,
            hint="install BlockFlow's worker dependencies on this host",
        ) from e
    engine: Engine = cls(block, options)
    return engine
