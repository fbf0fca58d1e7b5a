"""ProfileRecord: a measured profile as it is stored, what it is of, and whether it still holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from blockflow.core.engines import AUTO, Selection
from blockflow.core.measuring import Subject
from blockflow.core.model import BlockInfo
from blockflow.core.profile import StageProfile

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class ProfileKey:
    """What a profile is of: one block or a chain, under one engine with precision and options."""

    blocks: tuple[str, ...]
    engine: str
    precision: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, blocks: Sequence[str], selections: Sequence[Selection]) -> ProfileKey:
        """``auto`` stands for a chain whose blocks run under different engines."""
        first = selections[0]
        options = dict(first.options)
        for s in selections[1:]:
            if (s.engine, s.precision, dict(s.options)) != (first.engine, first.precision, options):
                return cls(tuple(blocks), AUTO, AUTO)
        return cls(tuple(blocks), first.engine, first.precision, options)

    @property
    def name(self) -> str:
        """The block, or the chain's blocks with '+' between them."""
        return "+".join(self.blocks)

    def subject(self, blocks: Sequence[str] = ()) -> Subject:
        """What a person measures to have it (again); ``blocks`` as the command takes them, by
        default their names."""
        names = tuple(blocks) or self.blocks
        return Subject(names, self.engine, self.precision, self.options, len(names) > 1)

    def file(self, machine: str) -> str:
        """Name of the file for a machine. Options and chains are in it by their digests."""
        parts = [machine, self.engine, self.precision]
        if self.options:
            parts.append("o" + _short(json.dumps(dict(self.options), sort_keys=True)))
        if len(self.blocks) > 1:
            parts.append("c" + _short(self.name))
        return ".".join([*parts, "json"])


@dataclass(frozen=True, slots=True)
class ProfileRecord:
    """A profile as it is stored.

    Attributes:
        key: what it is of.
        profile: the times of the block, or of the whole chain.
        parts: of a chain: the times of each block in it.
        ran: block -> engine, precision and sha256 of the file (the artifact or a variant).
        facts: the machine, as :func:`blockflow.repository.machine.describe` told it.
        settings: how it was measured, for the reader and for going on.
        complete: False while a measurement is under way or was interrupted.
        when: UTC, ISO 8601.
    """

    key: ProfileKey
    profile: StageProfile
    parts: tuple[StageProfile, ...]
    ran: Mapping[str, str]
    facts: Mapping[str, Any]
    settings: Mapping[str, Any]
    complete: bool
    when: str

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "blocks": list(self.key.blocks),
            "options": dict(self.key.options),
            "profile": self.profile.to_dict(),
            "parts": [p.to_dict() for p in self.parts],
            "ran": dict(self.ran),
            "facts": dict(self.facts),
            "settings": dict(self.settings),
            "complete": self.complete,
            "when": self.when,
        }

    @classmethod
    def from_dict(cls, data: Any) -> ProfileRecord:
        """Inverse of :meth:`to_dict`. Raises ValueError."""
        try:
            if data["schema_version"] != SCHEMA_VERSION:
                raise ValueError(f"schema version {data['schema_version']!r}")
            profile = StageProfile.from_dict(data["profile"])
            options, ran = dict(data["options"]), dict(data["ran"])
            blocks = tuple(str(b) for b in data["blocks"])
            return cls(
                ProfileKey(blocks, profile.engine, profile.precision, options),
                profile,
                tuple(StageProfile.from_dict(p) for p in data["parts"]),
                {str(k): str(v) for k, v in ran.items()},
                dict(data["facts"]),
                dict(data["settings"]),
                data["complete"] is True,
                str(data["when"]),
            )
        except (KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"not a profile: {type(e).__name__}: {e}") from e


def chain_digest(infos: Sequence[BlockInfo]) -> str:
    """What identifies a chain's artifacts; of one block: its digest."""
    if len(infos) == 1:
        return infos[0].digest
    return hashlib.sha256("+".join(i.digest for i in infos).encode()).hexdigest()


def ran_by(infos: Sequence[BlockInfo], selections: Sequence[Selection]) -> dict[str, str]:
    """block -> engine, precision and sha256 of the file that its selection loads."""
    out = {}
    for info, s in zip(infos, selections, strict=True):
        digest = info.digest if s.variant is None else info.variants[s.variant].digest
        out[info.name] = f"{s.engine} {s.precision} {digest}"
    return out


def staleness(
    record: ProfileRecord, digest: str, ran: Mapping[str, str], facts: Mapping[str, Any]
) -> list[str]:
    """Why ``record`` does not hold (any more); empty if it does.

    Args:
        record: a stored profile.
        digest: :func:`chain_digest` of the blocks as they are now.
        ran: :func:`ran_by` of them.
        facts: the machine as it is now.
    """
    out = []
    if record.profile.digest != digest:
        out.append(f"artifact: measured {record.profile.digest[:12]}, now {digest[:12]}")
    elif dict(record.ran) != dict(ran):
        out.append("a converted variant was made anew, or another engine runs a block")
    for name in {**facts, **record.facts}:
        was, now = record.facts.get(name), facts.get(name)
        if was != now:
            out.append(f"{name}: measured on {was or 'none'}, now {now or 'none'}")
    return out


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
