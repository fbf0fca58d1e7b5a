"""Which class is which engine: one line per engine; what each can do is in core.engines.

An engine's module is imported when the engine is first asked for, so that ``echo`` needs no
framework and a missing optional package hurts only those who use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module

from blockflow.core.engines import AUTO, ENGINES, Selection, select
from blockflow.core.errors import BlockError, BlockFlowError, SystemError_
from blockflow.core.model import BlockInfo
from blockflow.core.scarcity import no_room
from blockflow.engine.base import Engine, EngineOptions
from blockflow.engine.extras import how_to_install
from blockflow.engine.frameworks import installed, openvino_lacks

CLASSES: Mapping[str, str] = {
    "exported": "blockflow.engine.exported:ExportedEngine",
    "torchscript": "blockflow.engine.torchscript:TorchScriptEngine",
    "compiled": "blockflow.engine.compiled:CompiledEngine",
    "onnxruntime": "blockflow.engine.onnx_runtime:OnnxRuntimeEngine",
    "openvino": "blockflow.engine.open_vino:OpenVinoEngine",
    "echo": "blockflow.engine.echo:EchoEngine",
}
"""Engine -> ``module:class``."""


def create_engine(
    block: BlockInfo, options: EngineOptions, engine: str = AUTO, *, machine: str = ""
) -> Engine:
    """Make the engine for a block; nothing is loaded yet.

    Which file it wants to load is its ``variant`` (None: the reference artifact).

    Args:
        block: the stored block.
        options: ``precision`` may be ``auto``.
        engine: a name of :data:`blockflow.core.engines.ENGINES`, or ``auto``.
        machine: this machine's fingerprint; '' = not known (:func:`blockflow.core.engines.select`).

    Raises:
        RepositoryError: UNSUPPORTED_FORMAT, ARTIFACT_MISSING.
        BlockError: UNSUPPORTED_ENGINE.
        SystemError_: MISSING_EXTRA when the engine's framework is not installed, or is one that
            does not go with the other packages.
    """
    chosen = select(
        block, engine, options.precision, options.extra, device=options.device, machine=machine
    )
    lacking = missing_extra(block, chosen.engine)
    if lacking is not None:
        raise lacking
    module, _, name = CLASSES[chosen.engine].partition(":")
    try:
        cls: type[Engine] = getattr(import_module(module), name)
    except ImportError as e:
        extra = ENGINES[chosen.engine].extra
        if not extra:
            raise
        raise no_room(e, str(e), block.name) or SystemError_(
            "MISSING_EXTRA",
            f"engine {chosen.engine!r} cannot import the package {extra!r} that is here: {e!r}",
            where=block.name,
            hint=how_to_install(extra),
        ) from e
    concrete = replace(options, precision=chosen.precision, extra=chosen.options)
    made = cls(block, concrete)
    made.name, made.variant = chosen.engine, chosen.variant
    return made


def missing_extra(block: BlockInfo, engine: str) -> SystemError_ | None:
    """The error for an engine whose package is not installed here, None when all is there."""
    extra = ENGINES[engine].extra
    if not extra or installed(extra):
        return None
    return SystemError_(
        "MISSING_EXTRA",
        f"engine {engine!r} needs the package {extra!r}",
        where=block.name,
        hint=how_to_install(extra),
        details={"field": "engine"},
    )


def host_misfit(block: BlockInfo, chosen: Selection) -> BlockFlowError | None:
    """Why this host cannot run what was selected, None if it can.

    To be asked on the host that will run it; nothing is loaded but, for OpenVINO's low precisions,
    the framework itself, which alone knows what it computes in.
    """
    lacking = missing_extra(block, chosen.engine)
    if lacking is None and chosen.engine == "openvino" and openvino_lacks(chosen.precision):
        return precision_lacking(block, chosen.precision)
    return lacking


def precision_lacking(block: BlockInfo, precision: str) -> BlockError:
    """OpenVINO would take fp32 without a word where the CPU has no ``precision``."""
    return BlockError(
        "UNSUPPORTED_ENGINE",
        f"this CPU does not compute in {precision!r} under OpenVINO",
        where=block.name,
        hint="use fp32 or int8, or engine 'exported', which computes in it on any CPU (slowly)",
        details={"field": "precision"},
    )
