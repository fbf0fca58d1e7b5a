"""Acceptance: is a system update right, do its artifacts exist, and does it fit this machine?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from blockflow.batching.registry import policy_problems
from blockflow.control.engines import engine_check
from blockflow.control.manager import Manager
from blockflow.control.policies import policy_misfits, with_stages
from blockflow.control.profiles import ProfileShelf
from blockflow.core.errors import Problem, RepositoryError, TopologyError
from blockflow.core.model import BlockInfo
from blockflow.core.topology import Lookup, Topology, parse_topology
from blockflow.repository.repository import BlockRepository

_HINT = "nothing was changed; mend all of them and send the update again"


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
        known: dict[str, BlockInfo] = {}

        def lookup(name: str) -> BlockInfo:
            # Once per block: two entries must not see two artifacts if one is stored meanwhile.
            if name not in known:
                info = repository.info(name, digest=(digests or {}).get(name))
                if info.digest not in running:
                    # Hash what is about to be loaded now: a missing or altered artifact is then
                    # one of the problems of this update instead of a failure in its middle.
                    info = repository.verify(name, digest=info.digest).to_info()
                known[name] = info
            return known[name]

        try:
            check = engine_check(repository, running)
            cores = manager.brain.realm.settings.cores
            topology = parse_topology(body, lookup, policy_problems, check, cores)
        except TopologyError as e:
            if not problems:
                raise
            found = [*problems, *e.problems]
            text = f"{len(found)} problems in the system update"
            raise TopologyError(e.code, text, problems=found, hint=e.hint) from None
        if problems:
            n = len(problems)
            raise TopologyError(
                "INVALID_TOPOLOGY",
                f"{n} problem{'s' if n > 1 else ''} in the system update",
                problems=problems,
                hint=_HINT,
            )
        topology = with_stages(self._profiles.with_costs(topology), cores, self._profiles)
        unfit = policy_misfits(topology, cores, self._profiles)
        if unfit:
            raise TopologyError(
                "INVALID_TOPOLOGY",
                f"{len(unfit)} batching polic{'ies' if len(unfit) > 1 else 'y'} cannot work",
                problems=unfit,
                hint=_HINT,
            )
        return topology


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
