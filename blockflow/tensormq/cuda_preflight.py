"""Whether this worker can share device memory with others, and if not, why not.

The answer is found by doing: small things are made and exported, as the slab will be. Whether
another process can open them shows there alone: see ``cuda_trial``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from blockflow.tensormq.cuda_api import CudaApi, CudaError, DeviceFacts, EventKind

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_SMALL = 2 << 20


@dataclass(frozen=True, slots=True)
class Capability:
    """Whether device memory can be shared; ``reason`` says why not; ``notes`` are worth a line in
    the log either way."""

    able: bool
    reason: str = ""
    notes: tuple[str, ...] = ()


def preflight(api: CudaApi, environment: Mapping[str, str]) -> Capability:
    """Ask the device, then try. Nothing is left behind; takes a few milliseconds."""
    notes = _notes(environment)
    why = _refusal(api.facts()) or _trial(api)
    return Capability(not why, why, notes)


def _refusal(facts: DeviceFacts) -> str:
    if not facts.unified_addressing:
        return f"{facts.name} has no unified addressing, which CUDA IPC needs"
    if not facts.ipc_events:
        return f"{facts.name} has no interprocess events (integrated and virtual devices lack them)"
    return ""


def _trial(api: CudaApi) -> str:
    pointer = event = 0
    try:
        pointer = api.mem_alloc(_SMALL)
        api.mem_export(pointer)
        event = api.event_create(EventKind.READY)
        api.event_export(event)
    except CudaError as exc:
        return f"a trial of CUDA IPC failed: {exc.message}"
    finally:
        if event:
            api.event_destroy(event)
        if pointer:
            api.mem_free(pointer)
    return ""


def expandable_segments(environment: Mapping[str, str]) -> bool:
    """Whether torch's pool is told to grow by mapping pieces, which have no CUDA IPC handle."""
    settings = ",".join(environment.get(name, "") for name in _ALLOCATOR_VARIABLES)
    pairs = (part.partition(":") for part in settings.replace(" ", "").lower().split(","))
    return any(key == "expandable_segments" and value in ("true", "1") for key, _, value in pairs)


def _notes(environment: Mapping[str, str]) -> tuple[str, ...]:
    if expandable_segments(environment):
        return (
            "torch's expandable segments are on: harmless here, since the slab is not of its pool",
        )
    return ()
