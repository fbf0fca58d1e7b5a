"""Candidates: what may run a block here, and why the rest may not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.bench.options import nonsense
from blockflow.core.engines import AUTO, ENGINES, PRECISIONS, Selection, own_engine, select
from blockflow.core.errors import BlockFlowError
from blockflow.core.guess import near
from blockflow.core.jsonarg import json_value
from blockflow.core.model import BlockInfo
from blockflow.engine.registry import missing_extra

ALL = "all"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One engine at one precision with its options, for each block of a chain.

    ``selections`` is empty and ``reason`` says why where it cannot run; ``extra`` are options
    beyond the engine's defaults.
    """

    engine: str
    precision: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    selections: tuple[Selection, ...] = ()
    reason: str = ""

    @property
    def label(self) -> str:
        """``openvino bf16``, with options in brackets."""
        options = ", ".join(f"{k}={_plain(v)}" for k, v in sorted(self.extra.items()))
        return f"{self.engine} {self.precision}" + (f" ({options})" if options else "")


def candidates(
    infos: Sequence[BlockInfo],
    engines: Sequence[str],
    precisions: Sequence[str],
    machine: str,
    extra: Mapping[str, Any] | None = None,
) -> list[Candidate]:
    """Everything that was asked for, able to run or not.

    Args:
        infos: the block, or the chain's blocks.
        engines: registered engines, ``auto`` or ``all``.
        precisions: of :data:`PRECISIONS`, or ``all``: what the engine has.
        machine: this machine's fingerprint.
        extra: options for every candidate; None also tries channels-last for images.

    Raises:
        RequestError: INVALID_REQUEST for an engine or a precision that does not exist.
    """
    for given, known, what in (
        (engines, (AUTO, ALL, *ENGINES), "engine"),
        (precisions, (ALL, *PRECISIONS), "precision"),
    ):
        for name in given:
            if name not in known:
                raise nonsense(f"unknown {what} {name!r}", hint=near(name, known))
    own = {own_engine(i.format) for i in infos}
    names = [e for e in ENGINES if e != "echo" or e in own] if ALL in engines else engines
    out: list[Candidate] = []
    for name in dict.fromkeys(names):
        if name == AUTO:
            # without a wish at all, whatever auto means; else auto's engine at that precision
            for p in [AUTO] if ALL in precisions else precisions:
                out.append(_candidate(infos, AUTO, p, extra or {}, machine))
            continue
        has = ENGINES[name].files
        for p in has if ALL in precisions else precisions:
            plain = _candidate(infos, name, p, extra or {}, machine)
            out.append(plain)
            if extra is None and not plain.reason:
                out += [_candidate(infos, name, p, o, machine) for o in _also(name, infos)]
    return out


def reference(info: BlockInfo, machine: str) -> Candidate:
    """The artifact format's own engine at fp32: what the others are compared with."""
    own = own_engine(info.format) or AUTO
    return _candidate([info], own, "fp32", {}, machine)


def _also(engine: str, infos: Sequence[BlockInfo]) -> list[Mapping[str, Any]]:
    """Options worth trying beside the defaults."""
    layouts = ENGINES[engine].options.get("memory_format")
    images = all(len(i.contract.input.dims) == 4 for i in infos)
    return [{"memory_format": "channels_last"}] if images and layouts is not None else []


def _candidate(
    infos: Sequence[BlockInfo],
    engine: str,
    precision: str,
    extra: Mapping[str, Any],
    machine: str,
) -> Candidate:
    try:
        found = tuple(select(i, engine, precision, extra, machine=machine) for i in infos)
    except BlockFlowError as e:
        return Candidate(engine, precision, dict(extra), reason=told(e))
    first = found[0]
    if engine == AUTO and len({(s.engine, s.precision) for s in found}) == 1:
        engine, precision, extra = first.engine, first.precision, first.options
    for info, s in zip(infos, found, strict=True):
        lacking = missing_extra(info, s.engine)
        if lacking is not None:
            return Candidate(engine, precision, dict(extra), reason=told(lacking))
    return Candidate(engine, precision, dict(extra), found)


def parse_option(text: str) -> tuple[str, Any]:
    """``KEY=JSON``; what is no JSON is a string.

    Raises:
        RequestError: INVALID_REQUEST.
    """
    key, sign, value = text.partition("=")
    if not sign or not key or not value:
        raise nonsense(
            f"{text!r} is not KEY=VALUE", hint="for example --option memory_format=channels_last"
        )
    return key, json_value(value, f"--option {key}")


def told(error: BlockFlowError) -> str:
    """An error as a reason: what was wrong, and what helps."""
    return error.message + (f" -- {error.hint}" if error.hint else "")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def unique(found: Sequence[Candidate]) -> list[Candidate]:
    """Without those that come to the same as an earlier one (``auto`` and the engine's name)."""
    out: dict[str, Candidate] = {}
    for c in found:
        out.setdefault(c.label, c)
    return list(out.values())
