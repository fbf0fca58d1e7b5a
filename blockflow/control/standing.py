"""Standing: what of the repository counts for the epoch in force. Pure.

It was looked up when the epoch was accepted, or deployed at a start, and holds until the next one,
whatever has been measured or stored since: for a Manager's successor as well, who so needs no
repository, which may not answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from blockflow.batching.registry import policy_problems, with_overlap
from blockflow.core.model import BlockInfo
from blockflow.core.specs import PolicySpec
from blockflow.core.topology import Topology, parse_topology


@dataclass(frozen=True, slots=True)
class Standing:
    """All of it, for the journal.

    Attributes:
        infos: block, as the repository knows it -> its facts.
        policies: block of the topology -> its batching: ``none`` where its own cannot work.
        costs: as :class:`Topology` has them.
        notes: what is otherwise than the epoch means it, for people.
    """

    infos: Mapping[str, Any]
    policies: Mapping[str, Any]
    costs: Mapping[str, float]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, topology: Topology, notes: tuple[str, ...]) -> Self:
        blocks = topology.blocks
        return cls(
            infos={b.artifact: topology.infos[name].to_dict() for name, b in blocks.items()},
            policies={name: b.batching.model_dump(mode="json") for name, b in blocks.items()},
            costs=dict(topology.costs),
            notes=notes,
        )

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Inverse of ``asdict``. Raises ValueError, KeyError or TypeError."""
        if set(d) != {f.name for f in fields(cls)}:
            raise ValueError("what counts for the epoch in force has other fields")
        costs = dict(d["costs"])
        if any(type(ms) not in (int, float) for ms in costs.values()):
            raise ValueError("costs are no numbers")
        return cls(dict(d["infos"]), dict(d["policies"]), costs, tuple(map(str, d["notes"])))

    def topology(self, stored: Mapping[str, Any]) -> Topology:
        """The topology in force, which was stored as ``stored``. Raises TopologyError, ValueError,
        LookupError or TypeError: it is not the one that this is about."""
        found = parse_topology(
            stored, lambda name: BlockInfo.from_dict(self.infos[name]), policy_problems
        )
        blocks = {
            name: b.model_copy(update={"batching": PolicySpec.model_validate(self.policies[name])})
            for name, b in found.blocks.items()
        }
        return with_overlap(replace(found, blocks=blocks, costs=self.costs))
