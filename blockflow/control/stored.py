"""StoredState: what survives the end of a control plane, with the epochs before. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

FORMAT = 3
"""Of the document on disk. Format 1, of release 0.1.0, is read as well."""

HISTORY = 20
"""Epochs that are remembered, the one in force among them."""

HISTORY_BYTES = 4 * 1024 * 1024
"""And no more than so much of what was posted for them."""

NUMBER_STRIDE = 4096
"""So many incarnations or stages are reserved by one save at most."""


@dataclass(frozen=True, slots=True)
class PastEpoch:
    """One topology that was put in force.

    Attributes:
        epoch: its number.
        how: kind of the update that did it.
        when: UTC, ISO 8601; '' = not known.
        posted: the body as it was posted.
        digests: block of the repository -> sha256 of the artifact that it was then.
    """

    epoch: int
    how: str
    when: str
    posted: Mapping[str, Any]
    digests: Mapping[str, str]

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Inverse of ``asdict``. Raises ValueError on a missing field or a wrong type."""
        if type(data) is not dict or set(data) != set(cls.__dataclass_fields__):
            raise ValueError("an epoch of the history has other fields")
        types = {"epoch": int, "how": str, "when": str, "posted": dict, "digests": dict}
        for name, kind in types.items():
            if type(data[name]) is not kind:
                raise ValueError(f"{name} of an epoch of the history is {data[name]!r:.80}")
        return cls(**data)


@dataclass(frozen=True, slots=True)
class StoredState:
    """What survives a restart.

    Attributes:
        epoch: number of the topology, 0 = none was ever applied.
        posted: the body as it was posted, for people.
        topology: its normalised form, which is deployed again; None at epoch 0.
        next_incarnation, next_stage, next_epoch: numbers at and above these were never given out.
        history: the latest epochs in order; the last one is that in force.
    """

    epoch: int = 0
    posted: Mapping[str, Any] | None = None
    topology: Mapping[str, Any] | None = None
    next_incarnation: int = 1
    next_stage: int = 1
    next_epoch: int = 1
    history: tuple[PastEpoch, ...] = ()

    @property
    def digests(self) -> Mapping[str, str]:
        """The artifacts of the epoch in force; empty where that is not known."""
        return self.history[-1].digests if self.history else {}

    @property
    def numbers(self) -> tuple[int, int, int, int]:
        """All that must never go back."""
        return self.epoch, self.next_incarnation, self.next_stage, self.next_epoch

    def fallen_back(self) -> StoredState:
        """This state in the place of a later one that was lost. That one was a single save later:
        it may have reserved a stride of each number, or put an epoch in force. Nothing of that is
        given out again."""
        return replace(
            self,
            next_incarnation=self.next_incarnation + NUMBER_STRIDE,
            next_stage=self.next_stage + NUMBER_STRIDE,
            next_epoch=self.next_epoch + 1,
        )

    def beyond(self, *, incarnation: int, stage: int, epoch: int) -> StoredState:
        """This state, knowing that these numbers, and perhaps lower ones, were given out."""
        return replace(
            self,
            next_incarnation=max(self.next_incarnation, incarnation + 1),
            next_stage=max(self.next_stage, stage + 1),
            next_epoch=max(self.next_epoch, epoch + 1),
        )

    def committed(self, past: PastEpoch, topology: Mapping[str, Any]) -> StoredState:
        """This state with ``past`` in force; the oldest epochs are forgotten."""
        history = [*self.history, past][-HISTORY:]
        sizes = [len(json.dumps(p.posted)) for p in history]
        while len(history) > 1 and sum(sizes) > HISTORY_BYTES:
            del history[0], sizes[0]
        return replace(
            self,
            epoch=past.epoch,
            posted=past.posted,
            topology=topology,
            next_epoch=max(self.next_epoch, past.epoch + 1),
            history=tuple(history),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form. What it holds is this state's own: copies would take seconds."""
        history = [{n: getattr(p, n) for n in p.__dataclass_fields__} for p in self.history]
        return {**{n: getattr(self, n) for n in self.__dataclass_fields__}, "history": history}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> StoredState:
        """Inverse of :meth:`to_dict`. Raises ValueError on a missing field or a wrong type."""
        if set(data) != set(cls.__dataclass_fields__):
            raise ValueError(f"fields {sorted(data)}")
        if type(data["epoch"]) is not int or data["epoch"] < 0:
            raise ValueError(f"epoch is {data['epoch']!r}")
        for name, least in (
            ("next_incarnation", 1),
            ("next_stage", 1),
            ("next_epoch", data["epoch"] + 1),
        ):
            if type(data[name]) is not int or data[name] < least:
                raise ValueError(f"{name} is {data[name]!r}")
        for name in ("posted", "topology"):
            if data[name] is not None and type(data[name]) is not dict:
                raise ValueError(f"{name} is not an object")
        if (data["epoch"] > 0) != (data["topology"] is not None):
            raise ValueError(f"epoch {data['epoch']} does not go with its topology")
        if not isinstance(data["history"], list | tuple):
            raise ValueError("history is not a list")
        history = tuple(PastEpoch.from_dict(p) for p in data["history"])
        epochs = [p.epoch for p in history]
        if epochs != sorted(set(epochs)) or epochs[-1:] != [data["epoch"]][: data["epoch"]]:
            raise ValueError(f"the history's epochs {epochs} do not lead to {data['epoch']}")
        return cls(**{**data, "history": history})

    @classmethod
    def from_format_1(cls, data: Mapping[str, Any]) -> StoredState:
        """The state of a release that kept no history, which begins with the epoch in force; the
        next epoch is the one after that."""
        if "history" in data or "next_epoch" in data:
            raise ValueError("a later format than it says")
        epoch, posted = data.get("epoch"), data.get("posted") or {}
        known = epoch if type(epoch) is int and epoch > 0 else 0
        past = {"epoch": known, "how": "system-update", "when": "", "posted": posted, "digests": {}}
        history = [past] if known else []
        return cls.from_dict({**data, "next_epoch": known + 1, "history": history})
