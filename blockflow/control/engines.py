"""Engine checks of a system update: what the Manager can know before it starts a worker.

Workers run on this host, so its packages, CPU, devices and fingerprint are the ones that count.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from blockflow.core.engines import misfits, select
from blockflow.core.entries import told
from blockflow.core.errors import BlockError, BlockFlowError, Problem
from blockflow.core.jsonpath import member
from blockflow.core.model import BlockInfo
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import EngineCheck
from blockflow.engine.registry import host_misfit
from blockflow.repository.machine import fingerprint
from blockflow.repository.repository import BlockRepository
from blockflow.tensormq.cuda_here import devices_here


def engine_check(repository: BlockRepository, running: Collection[str]) -> EngineCheck:
    """The check for :func:`~blockflow.core.topology.parse_topology`.

    Args:
        repository: where variants lie; what is about to be loaded is hashed now, so that a missing
            or altered file is a problem of the update and not a failure in its middle.
        running: digests of reference artifacts that live workers have loaded: their variants have
            been seen.
    """

    def check(spec: BlockSpec, info: BlockInfo, path: str) -> Sequence[Problem]:
        asked = (info, spec.engine, spec.precision, spec.options)
        machine = fingerprint()
        found = misfits(*asked, device=spec.device, machine=machine)
        if not found:
            chosen = select(*asked, device=spec.device, machine=machine)
            try:
                unfit = host_misfit(info, chosen)
                if unfit is not None:
                    found.append(unfit)
                if chosen.variant is not None and info.digest not in running:
                    digest = info.variants[chosen.variant].digest
                    repository.verify(info.name, variant=chosen.variant, digest=digest)
            except BlockFlowError as e:
                found.append(e)
        if not any(e.details.get("field") == "device" for e in found):
            found += _missing_device(spec)
        return told([_problem(e, path) for e in found], path)

    return check


def _missing_device(spec: BlockSpec) -> list[BlockFlowError]:
    here = devices_here(os.environ)
    why = "" if here is None else here.missing(spec.device)
    if not why:
        return []
    hint = "place the block on one of these, or on cpu" if here and here.count else "use cpu"
    details = {"field": "device"}
    return [BlockError("UNSUPPORTED_ENGINE", why, where=spec.name, hint=hint, details=details)]


def lost_artifact(repository: BlockRepository, spec: BlockSpec, info: BlockInfo) -> str:
    """Why a worker of this block could not be replaced: what it runs is not stored any more.

    Empty if it is; nothing is hashed.
    """
    machine = fingerprint()
    try:
        chosen = select(
            info, spec.engine, spec.precision, spec.options, device=spec.device, machine=machine
        )
        kind = chosen.variant
        digest = info.digest if kind is None else info.variants[kind].digest
        with repository.artifact(info.name, digest=digest, variant=kind, check=False):
            return ""
    except BlockFlowError as e:
        hint = f" -- {e.hint}" if e.hint else ""
        return f"block {spec.name}: a worker that ends cannot be replaced: {e.message}{hint}"


def _problem(error: BlockFlowError, path: str) -> Problem:
    field, _, option = error.details.get("field", "engine").partition(".")
    place = member(path, field)
    if field == "options":
        place = member(place, option)
    return Problem(place, f"{error.code}: {error.message}", error.hint, error.code)
