"""The summary of a call as one JSON document: what was measured, on what, of what, with what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from blockflow.bench.mlperf.session import Session
from blockflow.bench.mlperf.validation import Outcome
from blockflow.bench.results import fingerprint, today
from blockflow.core.errors import BlockFlowError, make_error
from blockflow.repository.machine import version_of

FORMAT = 5
"""Of the document; a change that readers would notice gets the next number."""


def make_document(session: Session, command: str) -> dict[str, Any]:
    """Everything of a session but the single latencies.

    ``official`` and ``full_length`` only if every run is; ``partial`` if something broke off, or
    more was to come, with ``error``.
    """
    results = session.results
    error = session.error or (None if session.ended else unfinished())
    return {
        "format": FORMAT,
        "command": command,
        "date": today(),
        "official": bool(results) and all(r.result.settings.official for r in results),
        "full_length": bool(results) and all(r.result.settings.full_length for r in results),
        "partial": error is not None,
        "valid": bool(results)
        and error is None
        and all(r.result.verdict.valid for r in results)
        and all(c.outcome is Outcome.PASSED for c in session.checks),
        "error": None if error is None else error.to_dict(),
        "machine": {**fingerprint(), "mlcommons-loadgen": version_of("mlcommons-loadgen")},
        "fixed_work": None if session.steadiness is None else asdict(session.steadiness),
        "system": session.system,
        "data": session.data_record(),
        "plan": session.plan.to_dict(),
        "results": [r.to_dict() for r in results],
        "validation": [c.to_dict() for c in session.checks],
    }


def unfinished() -> BlockFlowError:
    """Of a call that is under way: if it is killed, what it has written so far says this."""
    return make_error("CANCELLED", "the call has not come to its end: more was to be measured")


def digests(document: Mapping[str, Any]) -> dict[str, str]:
    """Block -> digest of its artifact, where REST has told."""
    blocks = document["system"].get("blocks", [])
    listed = blocks.get("blocks", []) if isinstance(blocks, Mapping) else blocks
    return {str(b["name"]): str(b["digest"]) for b in listed}
