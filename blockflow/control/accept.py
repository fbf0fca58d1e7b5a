"""Acceptance: is a system update right, do its artifacts exist, and does it fit this machine?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blockflow.batching.registry import policy_problems
from blockflow.control.engines import engine_check
from blockflow.control.manager import Manager
from blockflow.control.policies import policy_misfits, with_stages
from blockflow.control.profiles import ProfileShelf
from blockflow.core.artifacts import Lookup
from blockflow.core.errors import BlockFlowError, Problem, RepositoryError
from blockflow.core.model import BlockInfo
from blockflow.core.placement import crowding_problems
from blockflow.core.topology import Topology, draft_topology, invalid_update
from blockflow.repository.repository import BlockRepository


class Acceptance:
    """Checks what is posted, before anything is changed.

    Args:
        manager: knows what runs.
        repository: where blocks are looked up.
        profiles: what was measured of them.
    """

    def __init__(
        self, manager: Manager, repository: BlockRepository, profiles: ProfileShelf
    ) -> None:
        self._manager = manager
        self._repository = repository
        self._profiles = profiles

    def parse(
        self,
        body: Any,
        problems: Sequence[Problem] = (),
        digests: Mapping[str, str] | None = None,
    ) -> Topology:
        """Validate a system update, artifacts included.

        Args:
            body: decoded JSON.
            problems: what the decoding found already (names that stand twice); they are reported
                together with what is found here.
            digests: block of the repository -> the artifact that must be meant by it. A block that
                is not among them is taken as it is now.

        Raises:
            TopologyError: INVALID_TOPOLOGY with all problems and their JSON paths.
        """
        manager, repository = self._manager, self._repository
        running = manager.call(
            lambda: {
                s.info.digest
                for r in manager.brain.crew.fleet.active()
                for s in r.spec.stages
                if r.wanted
            }
        )
        known: dict[tuple[str, str | None], BlockInfo] = {}

        def find(name: str, digest: str | None) -> BlockInfo:
            # Once per block: two entries must not see two artifacts if one is stored meanwhile.
            if (name, digest) not in known:
                info = repository.info(name, digest=digest)
                if info.digest not in running:
                    # Hash what is about to be loaded now: a missing or altered artifact is then
                    # one of the problems of this update instead of a failure in its middle.
                    info = repository.verify(name, digest=info.digest).to_info()
                known[name, digest] = info
            return known[name, digest]

        def lookup(name: str) -> BlockInfo:
            return find(name, (digests or {}).get(name))

        check = engine_check(repository, running)
        cores = manager.brain.realm.settings.cores
        draft = draft_topology(body, lookup, policy_problems, check, cores, find)
        judged, crowded, unfit = draft.topology, list[Problem](), list[Problem]()
        try:
            judged = self._profiles.with_costs(judged)
            crowded = crowding_problems(judged, cores, draft.index)
            # With more threads than cores it is judged as if that was meant: nothing better is
            # known.
            judged = replace(judged, oversubscribe=True) if crowded else judged
            if draft.whole:  # else the threads that the plan would give are not known
                judged = with_stages(judged, cores, self._profiles)
                unfit = policy_misfits(judged, cores, self._profiles)
        except BlockFlowError as e:  # a profile cannot be read just now
            unfit = [Problem("$.blocks", f"{e.code}: {e.message}", e.hint, e.code)]
        found = [*problems, *draft.problems, *crowded, *unfit]
        if found:
            raise invalid_update(found)
        return judged


def as_posted(body: Any) -> Any:
    """A copy, as decoded JSON: it is remembered and stored, whatever becomes of the caller's own.

    Raises:
        TopologyError: INVALID_TOPOLOGY: JSON has no such thing.
    """
    try:
        return json.loads(json.dumps(body))
    except (TypeError, ValueError, RecursionError) as e:
        raise invalid_update([Problem("$", str(e), "use what JSON has")]) from e


def stored_lookup(
    repository: BlockRepository, digests: Mapping[str, str], notes: list[str]
) -> Lookup:
    """How the stored topology finds its blocks at start: the very artifacts that it meant.

    One that is not there any more gives way to what bears its name now, and ``notes`` says so: a
    system that serves something is better than none, but nobody must be left in the dark.
    """

    def lookup(name: str) -> BlockInfo:
        digest = digests.get(name)
        try:
            return repository.info(name, digest=digest)
        except RepositoryError as e:
            if e.code != "ARTIFACT_MISSING" or digest is None:
                raise
            info = repository.info(name)
            notes.append(
                f"block {name}: the artifact {digest[:12]} that was in force is gone; version "
                f"{info.version} ({info.digest[:12]}) runs instead"
            )
            return info

    return lookup
