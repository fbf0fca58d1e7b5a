"""Artifacts: what an update's blocks are in the repository, by a lookup that is given. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from blockflow.core.errors import BlockFlowError, Problem, RepositoryError
from blockflow.core.model import BlockInfo
from blockflow.core.specs import BlockSpec

Lookup = Callable[[str], BlockInfo]
"""A stored block's facts, by its name or ``name@version``."""
Pinned = Callable[[str, str], BlockInfo]
"""The facts of the artifact with a digest, whatever the block's name means today."""


def by_name(lookup: Lookup) -> Pinned:
    """For who knows one artifact per name: it is the one that is meant, or there is none."""

    def pinned(name: str, digest: str) -> BlockInfo:
        info = lookup(name)
        if info.digest != digest:
            raise RepositoryError(
                "ARTIFACT_MISSING",
                f"block {name!r} has the digest {info.digest[:16]}..., not {digest[:16]}...",
            )
        return info

    return pinned


def found_artifacts(
    blocks: Mapping[str, BlockSpec],
    where: Mapping[Any, int],
    lookup: Lookup,
    pinned: Pinned,
    problems: list[Problem],
) -> dict[str, BlockInfo]:
    """The facts of each block that is stored; of the others ``problems`` gets what is wrong."""
    out: dict[str, BlockInfo] = {}
    digests: dict[str, str] = {}
    for name, spec in blocks.items():
        path = f"$.blocks[{where[name]}]"
        try:
            if spec.digest is None:
                info = lookup(spec.artifact)
            else:
                info = pinned(spec.artifact, spec.digest)
        except BlockFlowError as exc:
            problems.append(_missing(exc, spec, path))
            continue
        out[name] = info
        # What is remembered of an epoch is one digest for each stored name.
        if digests.setdefault(spec.artifact, info.digest) != info.digest:
            problems.append(
                Problem(
                    f"{path}.digest",
                    f"another block of this update means another artifact of {spec.artifact!r}",
                    "give both the same digest, or name their versions",
                )
            )
    return out


def _missing(exc: BlockFlowError, spec: BlockSpec, path: str) -> Problem:
    message, hint = f"{exc.code}: {exc.message}", exc.hint
    if spec.digest is not None and exc.code == "ARTIFACT_MISSING":
        path += ".digest"
        hint = "leave digest out to have what the name means now, or store that artifact again"
    return Problem(path, message, hint, exc.code)
