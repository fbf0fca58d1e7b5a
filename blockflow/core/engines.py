"""Engine kinds: which engine runs which file, at which precision, on which device.

Pure facts, so that the control plane can check a topology and a worker can choose without loading
a framework. The engines themselves are in the engine room; docs/engines.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.core.errors import BlockError, BlockFlowError, RepositoryError
from blockflow.core.guess import FEW, Guesses, near
from blockflow.core.limits import MAX_ROWS
from blockflow.core.model import ROWS, BlockInfo, TensorSpec

AUTO = "auto"
TORCH_EXPORT = "torch.export"
"""How an exported program gets onto a GPU, and one that is not read as data is loaded at all."""
PRECISIONS = ("fp32", "bf16", "fp16", "int8")
"""``fp32`` is the artifact as it is; ``int8`` is a calibrated variant."""

VARIANTS: Mapping[str, str] = {
    "onnx": "the block as an ONNX file",
    "onnx-int8": "the ONNX file quantised to 8 bits, calibrated on sample inputs",
    "aoti": "machine code compiled by torch on and for one machine",
}
"""What ``blockflow convert`` makes of a block beside its reference artifact."""

Rule = tuple[Any, ...] | type
"""Allowed values of an option, or their type: float, or list for numbers of rows."""

_FLAG: Rule = (True, False)
_TORCH_OPTIONS: Mapping[str, Rule] = {"memory_format": ("contiguous", "channels_last")}


@dataclass(frozen=True, slots=True)
class EngineKind:
    """What one engine is able to do.

    Attributes:
        files: precision -> kinds of file that it loads for it: artifact formats or variants.
        devices: kinds of device.
        extra: the optional dependency that it needs, '' = none; also the name of the package.
        options: its options and their allowed values.
        side_by_side: several forwards of one loaded block may go on at once, on a CPU.
    """

    files: Mapping[str, tuple[str, ...]]
    devices: tuple[str, ...] = ("cpu",)
    extra: str = ""
    options: Mapping[str, Rule] = field(default_factory=dict)
    side_by_side: bool = False


FIXED_ROWS = "rows"
"""Option: batches of these numbers of rows run in models of their own, made for just these dims."""
MOST_FIXED_ROWS = 16
"""Each has its weights in memory once more."""

WEIGHTS = "weights"
"""Option: where the weights of a worker with replicas lie."""
OWN_WEIGHTS = "own"

_PT2 = ("pt2",)
_SCRIPT = ("torchscript-scripted", "torchscript-traced")

ENGINES: Mapping[str, EngineKind] = {
    "exported": EngineKind(
        {"fp32": _PT2, "bf16": _PT2, "fp16": _PT2},
        devices=("cpu", "cuda"),
        options={
            **_TORCH_OPTIONS,
            WEIGHTS: ("shared", OWN_WEIGHTS),
            "cuda_graph": _FLAG,
            "compile": _FLAG,
        },
        side_by_side=True,
    ),
    "torchscript": EngineKind(
        {"fp32": _SCRIPT, "bf16": _SCRIPT, "fp16": _SCRIPT},
        devices=("cpu", "cuda"),
        options=_TORCH_OPTIONS,
    ),
    "compiled": EngineKind({"fp32": ("aoti",)}),
    "onnxruntime": EngineKind(
        {"fp32": ("onnx",), "int8": ("onnx-int8",)},
        extra="onnxruntime",
        options={"spin": _FLAG},
    ),
    "openvino": EngineKind(
        {"fp32": ("onnx",), "bf16": ("onnx",), "fp16": ("onnx",), "int8": ("onnx-int8",)},
        extra="openvino",
        options={FIXED_ROWS: list},
    ),
    "echo": EngineKind(
        {"fp32": ("echo",)},
        options={
            "delay_ms": float,
            "row_ms": float,
            "touch_mib": float,
            "still": float,
            "fail_on_value": float,
            "crash_on_value": float,
            "fail_on_load": float,
            "crash_on_load": float,
        },
        side_by_side=True,
    ),
}
"""By name, as a topology's ``engine`` says it."""

UNLOADED = "cannot load it: "
DIFFERS = "differs by "
"""What the reasons against an engine begin with."""

AS_IT_IS = "stay with engine 'exported', which runs the block as it is"
"""What is left where no variant can be made."""

CUDA_ONLY = ("cuda_graph", "compile")
"""Options that make sense on a GPU alone: on a CPU, compile ahead of time (engine ``compiled``)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What runs a block: nothing is ``auto`` any more.

    ``variant`` names the file to load; None is the reference artifact.
    """

    engine: str
    precision: str
    options: Mapping[str, Any]
    variant: str | None


def own_engine(format_: str) -> str | None:
    """The engine that loads reference artifacts of a format; None = there is none."""
    for name, kind in ENGINES.items():
        if format_ in kind.files["fp32"] and format_ not in VARIANTS:
            return name
    return None


def select(
    block: BlockInfo,
    engine: str = AUTO,
    precision: str = AUTO,
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    machine: str = "",
) -> Selection:
    """Decide what runs ``block``.

    ``auto`` is the choice that ``blockflow profile --choose`` has recorded for this machine, where
    there is one of this release that keeps to an explicit ``precision``, has all given options and
    was not refused since; else the format's own engine at fp32. Given options go over a choice's.

    Args:
        block: the stored block with its variants and choices.
        engine, precision, options, device: as a topology says them.
        machine: fingerprint of where it shall run; '' = not known: no choice is found, and what is
            bound to a machine is taken on trust.

    Raises:
        RepositoryError: UNSUPPORTED_FORMAT when no engine loads the format; ARTIFACT_MISSING when
            the variant has not been made (or not on this machine), with the command that makes it.
        BlockError: UNSUPPORTED_ENGINE when engine, precision, option or device do not go together,
            or the engine was refused the variant when that was made.
    """
    found = misfits(block, engine, precision, options, device=device, machine=machine)
    if found:
        raise found[0]
    name, precision, given = _settle(block, engine, precision, options or {}, device, machine)
    kinds = ENGINES[name].files[precision]
    variant = None if block.format in kinds else kinds[0]
    return Selection(name, precision, given, variant)


def loaders(block: BlockInfo, engine: str = AUTO, device: str = "cpu") -> set[str]:
    """What may come to load ``block``, on whatever machine: engines, and :data:`TORCH_EXPORT`."""
    found = {engine}
    if engine == AUTO:
        own = own_engine(block.format)
        found = {str(c["engine"]) for c in block.choices.values()} | ({own} if own else set())
    to_a_gpu = "exported" in found and device != "cpu"
    return found | {TORCH_EXPORT} if to_a_gpu else found


def pins(block: BlockInfo, engine: str) -> dict[str, Any]:
    """What beside the reference artifact decides what a worker with this ``engine`` would run.

    Two equal answers mean that a running worker need not be replaced.
    """
    choices = dict(block.choices) if engine == AUTO else {}
    names = [str(c["engine"]) for c in choices.values()] or [engine]
    kinds = {k for n in names if n in ENGINES for f in ENGINES[n].files.values() for k in f}
    variants = {k: v.digest for k, v in block.variants.items() if k in kinds}
    found = {"choices": choices, "variants": variants}
    refused = {k: sorted(v.refused) for k, v in block.variants.items() if k in kinds and v.refused}
    return {**found, "refused": refused} if refused else found


def misfits(
    block: BlockInfo,
    engine: str = AUTO,
    precision: str = AUTO,
    options: Mapping[str, Any] | None = None,
    *,
    device: str = "cpu",
    machine: str = "",
) -> list[BlockFlowError]:
    """All that :func:`select` would raise; ``details["field"]`` says what each is about."""
    name, precision, given = _settle(block, engine, precision, options or {}, device, machine)
    kind = ENGINES.get(name)
    if kind is None:
        if engine == AUTO:
            return [_unsupported_format(block)]
        hint = near(name, [AUTO, *ENGINES])
        return [_refused(block, "engine", f"unknown engine {name!r}", hint)]
    found: list[BlockFlowError] = []
    if device.partition(":")[0] not in kind.devices:
        why = f"engine {name!r} does not run on {device!r}"
        found.append(_refused(block, "device", why, f"it runs on: {', '.join(kind.devices)}"))
    guesses = Guesses(kind.options, FEW)
    for option, value in given.items():
        problem = _option_problem(kind, option, value, device, guesses)
        if not problem and option == FIXED_ROWS:
            problem = _rows_problem(block.contract.input, value)
        if problem:
            found.append(_refused(block, f"options.{option}", *problem))
    if precision not in kind.files:
        why = f"engine {name!r} does not compute in {precision!r}"
        found.append(_refused(block, "precision", why, f"it has: {', '.join(kind.files)}"))
        return found
    unfit = _missing_file(block, name, kind.files[precision], machine) or _verdict(
        block, name, precision
    )
    return found if unfit is None else [*found, unfit]


def _settle(
    block: BlockInfo,
    engine: str,
    precision: str,
    options: Mapping[str, Any],
    device: str,
    machine: str,
) -> tuple[str, str, dict[str, Any]]:
    """Engine, precision and options without ``auto``; the engine is '' where there is none."""
    given = dict(options)
    if engine == AUTO:
        choice = block.choices.get(machine) if machine and device == "cpu" else None
        if choice is not None:
            name, chosen = str(choice["engine"]), str(choice["precision"])
            merged = {**choice.get("options", {}), **given}
            if (
                files_of(name, chosen)
                and precision in (AUTO, chosen)
                and merged.keys() <= ENGINES[name].options.keys()
                and not refusal(block, name, chosen)
            ):
                return name, chosen, merged
        engine = own_engine(block.format) or ""
    return engine, "fp32" if precision == AUTO else precision, given


def _option_problem(
    kind: EngineKind, name: str, value: Any, device: str, guesses: Guesses
) -> tuple[str, str] | None:
    """What is wrong with one option: (message, hint); None if nothing is."""
    rule = kind.options.get(name)
    if rule is None:
        return f"unknown option {name!r}", near(name, list(kind.options), guesses)
    if rule is list:
        if not _are_rows(value):
            why = f"option {name!r} is not a list of numbers of rows: {value!r}"
            return why, f"1 to {MOST_FIXED_ROWS} whole numbers, as [1, 8]"
    elif isinstance(rule, type):
        if not isinstance(value, int | float):
            return f"option {name!r} is not a number: {value!r}", ""
    elif not any(value == v and type(value) is type(v) for v in rule):
        return f"option {name!r} cannot be {value!r}", f"one of: {', '.join(map(str, rule))}"
    if name in CUDA_ONLY and value and not device.startswith("cuda"):
        return (
            f"option {name!r} needs a CUDA device, not {device!r}",
            "on a CPU, compile ahead of time: engine 'compiled'",
        )
    return None


def _are_rows(value: Any) -> bool:
    few = isinstance(value, list | tuple) and 1 <= len(value) <= MOST_FIXED_ROWS
    return few and all(type(n) is int and 1 <= n <= MAX_ROWS for n in value)


def _rows_problem(taken: TensorSpec, rows: Sequence[int]) -> tuple[str, str] | None:
    if taken.dynamic:
        why = f"option {FIXED_ROWS!r} is for blocks of which only the rows are dynamic"
        return why, f"so are here: {', '.join(taken.dynamic)}"
    most = taken.ranges.get(ROWS, (1, MAX_ROWS))[1]
    why = f"option {FIXED_ROWS!r} has {max(rows)}, the block was exported for {most} at most"
    return (why, f"leave out what is larger than {most}") if max(rows) > most else None


def _missing_file(
    block: BlockInfo, engine: str, kinds: Sequence[str], machine: str
) -> BlockFlowError | None:
    if block.format in kinds:
        return None
    variant = kinds[0]
    if variant not in VARIANTS:
        why = f"engine {engine!r} does not load format {block.format!r}"
        return _refused(block, "engine", why, f"it loads: {', '.join(kinds)}")
    found = block.variants.get(variant)
    if found is None and block.format not in _PT2:
        why = f"engine {engine!r} needs the variant {variant!r}, made of exported programs alone: "
        return _refused(
            block,
            "engine",
            f"{why}block {block.name!r} is {block.format}",
            "export the model again with --format pt2, the default, and convert that",
        )
    if found is None:
        why = f"engine {engine!r} needs the variant {variant!r}, which block {block.name!r} lacks"
    elif found.machine and machine and found.machine != machine:
        why = (
            f"variant {variant!r} of block {block.name!r} was compiled on machine "
            f"{found.machine}, this is {machine}"
        )
    else:
        return None
    command = f"blockflow convert {block.reference} --to {variant}"
    return RepositoryError(
        "ARTIFACT_MISSING",
        why,
        where=block.name,
        hint=f"make it: {command}",
        details={"field": "engine", "command": command},
    )


def files_of(engine: str, precision: str) -> tuple[str, ...]:
    """Kinds of file that ``engine`` loads for ``precision``; none if this release has no such."""
    return ENGINES[engine].files.get(precision, ()) if engine in ENGINES else ()


def refusal(block: BlockInfo, engine: str, precision: str) -> str:
    """What was found of ``engine`` when the variant that it would load was made, if that keeps it
    from running it; '' = nothing does."""
    variants = [block.variants[k] for k in files_of(engine, precision) if k in block.variants]
    return next((v.refused[engine] for v in variants if engine in v.refused), "")


def tolerable(reason: str) -> bool:
    """Whether more tolerance could let an engine run that was refused for ``reason``: what differs
    by as much as the largest value, or by what is no number, is another result."""
    return re.match(rf"{DIFFERS}(0\.|[\d.]+e-)", reason) is not None


def _verdict(block: BlockInfo, engine: str, precision: str) -> BlockError | None:
    why = refusal(block, engine, precision)
    if not why:
        return None
    (kind,) = ENGINES[engine].files[precision]
    others = [
        name
        for name, k in ENGINES.items()
        if kind in k.files.get(precision, ()) and name not in block.variants[kind].refused
    ]
    command = f"blockflow convert {block.reference} --to {kind}"
    allow = ", or with --tolerance to allow more" if tolerable(why) else ""
    return BlockError(
        "UNSUPPORTED_ENGINE",
        f"engine {engine!r} may not run variant {kind!r} of block {block.name!r}: it {why}",
        where=block.name,
        hint=f"use {' or '.join([*others, AUTO])}; or convert it again, with another version of "
        f"{engine}{allow}: {command}",
        details={"field": "engine", "command": command},
    )


def _refused(block: BlockInfo, field: str, message: str, hint: str) -> BlockError:
    return BlockError(
        "UNSUPPORTED_ENGINE", message, where=block.name, hint=hint, details={"field": field}
    )


def _unsupported_format(block: BlockInfo) -> RepositoryError:
    formats = [f for k in ENGINES.values() for f in k.files["fp32"] if f not in VARIANTS]
    return RepositoryError(
        "UNSUPPORTED_FORMAT",
        f"no engine loads format {block.format!r}",
        where=block.name,
        hint=f"known formats: {', '.join(formats)}",
        details={"field": "engine"},
    )
