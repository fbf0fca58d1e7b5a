"""Profiles for workers: the Manager hands each stage the measured profile that holds, if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from blockflow.batching.registry import with_overlap
from blockflow.control.events import Launch
from blockflow.control.fleet import NO_ROOM
from blockflow.core.engines import select
from blockflow.core.errors import BlockFlowError, RepositoryError
from blockflow.core.model import BlockInfo
from blockflow.core.placement import StagePlan
from blockflow.core.scarcity import is_away, passed_over
from blockflow.core.specs import BlockSpec
from blockflow.core.topology import Topology
from blockflow.repository.profile_record import ProfileRecord
from blockflow.repository.profiles import ProfileStore
from blockflow.repository.repository import BlockRepository
from blockflow.wire.control import SetPolicy


def passing(error: BlockFlowError) -> bool:
    """It is the repository that is away, or room to read it that is lacking at present."""
    return is_away(error) or error.code == NO_ROOM


class ProfileShelf:
    """Looks up profiles as they are needed, so that one measured meanwhile is found.

    Args:
        repository: folder of the block repository.
    """

    def __init__(self, repository: Path) -> None:
        self._store = ProfileStore(repository)
        self._repository = BlockRepository(repository)

    def attach(self, order: Launch) -> Launch:
        """The order with the profiles that hold for its stages.

        Raises:
            BlockFlowError: the repository is away, or there is no room to look: a policy that needs
                a profile would be refused for good.
        """
        spec = order.spec
        stages = [
            self.attached(s, spec["device"], s["threads"] or spec["threads"])
            for s in spec["stages"]
        ]
        return replace(order, spec={**spec, "stages": stages})

    def attached(self, stage: Mapping[str, Any], device: str, threads: int) -> dict[str, Any]:
        """:meth:`with_profile`. Raises as :meth:`attach`, where the stage has a policy."""
        if stage["policy"].get("policy", "none") == "none":
            return self.with_profile(stage, device, threads)
        try:
            return self._profiled(stage, device, threads)
        except BlockFlowError as e:
            if passing(e):
                raise
        info = BlockInfo.from_dict(stage["block"])
        with passed_over():  # what is wrong with a block its worker says
            self._repository.info(info.name, digest=info.digest)
        return dict(stage)

    def with_points(self, message: SetPolicy, plan: StagePlan) -> SetPolicy:
        """The message with the points for its threads of the profile that holds, if any."""
        spec = plan.spec
        try:
            found = self._find(plan.info, spec.engine, spec.precision, spec.options, spec.device)
        except BlockFlowError:
            return message  # a policy that needs one is refused by the worker, and that is told
        profile = found.profile.only(message.threads)
        return replace(message, profile=profile.to_dict() if profile.points else {})

    def with_costs(self, topology: Topology) -> Topology:
        """``topology`` with what steers its plan of threads: the measured cost of each block that
        has a profile, and how many batches each policy overlaps.

        Raises:
            BlockFlowError: as :meth:`attach`, where a block has a policy: by another plan it may
                get threads that it was not measured with, and would go without its policy.
        """
        batched = any(spec.batching.policy != "none" for spec in topology.blocks.values())
        costs: dict[str, float] = {}
        for name, spec in topology.blocks.items():
            asked = spec.engine, spec.precision, spec.options, spec.device
            try:
                costs[name] = self._find(topology.infos[name], *asked).profile.ms(1)
            except ValueError:
                continue  # not measured with one thread
            except BlockFlowError as e:
                if batched and passing(e):
                    raise
        return with_overlap(replace(topology, costs=costs))

    def state(self, spec: BlockSpec, info: BlockInfo) -> dict[str, Any]:
        """Whether a deployed block has a profile that holds: what its REST document says."""
        try:
            found = self._find(info, spec.engine, spec.precision, spec.options, spec.device)
        except BlockFlowError as e:
            return {"fresh": False, "reason": e.message, "command": e.details.get("command", "")}
        return {
            "fresh": True,
            "engine": found.profile.engine,
            "precision": found.profile.precision,
            "when": found.when,
            "threads": list(found.profile.threads_measured()),
            "points": len(found.profile.points),
        }

    def reference(self, info: BlockInfo) -> str:
        """How ``blockflow profile`` is told of this very artifact."""
        return self._store.reference(info)

    def with_profile(self, stage: Mapping[str, Any], device: str, threads: int) -> dict[str, Any]:
        """A :meth:`StageSpec.to_dict` with the profile that holds for it, if there is one: the
        points for ``threads``, for a process is told of all its blocks in one bounded order."""
        try:
            return self._profiled(stage, device, threads)
        except BlockFlowError:
            return dict(stage)  # a policy that needs one says so itself, with the command

    def _profiled(self, stage: Mapping[str, Any], device: str, threads: int) -> dict[str, Any]:
        info, asked = BlockInfo.from_dict(stage["block"]), (stage["engine"], stage["precision"])
        found = self._find(info, *asked, stage["options"], device)
        return {**stage, "profile": found.profile.only(threads).to_dict()}

    def _find(
        self,
        info: BlockInfo,
        engine: str,
        precision: str,
        options: Mapping[str, Any],
        device: str,
    ) -> ProfileRecord:
        if device != "cpu":
            raise RepositoryError("NO_PROFILE", "profiles are of the CPU", where=info.name)
        chosen = select(
            info, engine, precision, options, device=device, machine=self._store.machine
        )
        return self._store.fresh([info], [chosen])
