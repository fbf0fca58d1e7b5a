"""Specs: the entries of a system update, as people write them; each is checked by itself.

What holds between them (names, contracts, workers) is checked by :mod:`blockflow.core.topology`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from blockflow.core import limits

AUTO: Final = "auto"
MAX_THREADS = 1024

Name = Annotated[str, Field(pattern=limits.NAME_PATTERN)]
BlockName = Annotated[str, Field(pattern=limits.BLOCK_PATTERN, max_length=limits.MAX_NAME_CHARS)]
Version = Annotated[str, Field(pattern=rf"^{limits.VERSION_CHARS}$")]
Mode = Literal["tensormq", "zeromq"]
Transport = Literal["ipc", "tcp"]


def _threads(value: Any) -> int | str:
    if value == AUTO or (type(value) is int and 1 <= value <= MAX_THREADS):
        return value
    raise ValueError(f'expected "auto" or a number from 1 to {MAX_THREADS}')


Threads = Annotated[
    int | Literal["auto"],
    PlainValidator(_threads),
    WithJsonSchema(
        {"anyOf": [{"const": AUTO}, {"type": "integer", "minimum": 1, "maximum": MAX_THREADS}]}
    ),
]
"""Intra-op threads: a number, or planned over all workers (:mod:`blockflow.core.threads`)."""


def _lanes(value: Any) -> int | str:
    if value == AUTO or (type(value) is int and 1 <= value <= limits.MAX_LANES):
        return value
    raise ValueError(f'expected "auto" or a number from 1 to {limits.MAX_LANES}')


Lanes = Annotated[
    int | Literal["auto"],
    PlainValidator(_lanes),
    WithJsonSchema(
        {"anyOf": [{"const": AUTO}, {"type": "integer", "minimum": 1, "maximum": limits.MAX_LANES}]}
    ),
]
"""Forwards that a worker may compute at once: a number, or planned with the threads."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PolicySpec(BaseModel):
    """A batching policy by name; its options are checked by the policy itself."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    policy: Name = "none"


class BlockSpec(_Strict):
    """One block of a topology.

    ``block`` is the block's name in the repository when it differs from ``name``. ``version`` pins
    one of its versions (as ``name@version`` does); else the current one is meant. ``worker`` names
    the worker that hosts it; blocks with the same one share a process. ``threads`` are intra-op
    threads of a forward (default: planned over all workers), ``lanes`` the forwards that its worker
    may compute at once (default: planned), ``cores`` the cpu numbers it may use (default: all).
    ``slots`` and ``arena_mib`` bound the tensors it may have out at once.
    ``timeout_ms`` bounds one forward. ``replayable: false``: it must not run twice on the same
    request, not even when a worker died on the way. ``engine``, ``precision`` and ``options`` say
    what computes (:func:`blockflow.core.engines.select`).
    """

    name: BlockName
    block: BlockName | None = None
    version: Version | None = None
    device: Annotated[str, Field(pattern=r"^(cpu|cuda:[0-9]{1,2})$")] = "cpu"
    replicas: Annotated[int, Field(ge=1, le=limits.MAX_REPLICAS)] = 1
    threads: Threads = AUTO
    lanes: Lanes = AUTO
    cores: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    engine: Name = AUTO
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = AUTO
    batching: PolicySpec = PolicySpec()
    mode: Mode | None = None
    worker: Name | None = None
    max_rows: Annotated[int, Field(ge=1, le=limits.MAX_ROWS)] | None = None
    slots: Annotated[int, Field(ge=1, le=4096)] = 16
    arena_mib: Annotated[int, Field(ge=1, le=1024 * 1024)] | None = None
    timeout_ms: Annotated[int, Field(ge=0, le=3_600_000)] = 0
    replayable: bool = True
    options: dict[str, Any] = Field(default_factory=dict)

    @field_validator("batching", mode="before")
    @classmethod
    def _policy_name(cls, value: Any) -> Any:
        return {"policy": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_version(self) -> BlockSpec:
        stored = self.block or self.name
        if self.version is not None and "@" in stored:
            raise ValueError(f"{stored!r} has a version of its own beside {self.version!r}")
        return self

    @property
    def artifact(self) -> str:
        """The block in the repository: its name, or ``name@version``."""
        stored = self.block or self.name
        return stored if self.version is None else f"{stored}@{self.version}"

    @property
    def asked_threads(self) -> int | None:
        """The number of threads that was asked for; None = planned."""
        return None if self.threads == AUTO else self.threads

    @property
    def asked_lanes(self) -> int | None:
        """The number of lanes that was asked for; None = planned."""
        return None if self.lanes == AUTO else self.lanes


class CanarySpec(_Strict):
    """Another path for a ``share`` of a task's requests, to try it. 0: its blocks are loaded and
    wait; 1: every request takes it."""

    path: Annotated[list[BlockName], Field(min_length=1, max_length=limits.MAX_PATH_NODES)]
    share: Annotated[float, Field(ge=0, le=1)]


class TaskSpec(_Strict):
    """A task: its path, what its requests may ask, and its share of blocks that others use too.

    While several tasks of one ``priority`` wait at a block, their rows run in proportion to
    ``weight``; a higher priority runs first. ``max_batch_rows`` bounds the task's rows in a batch,
    ``max_inflight_rows`` those in the whole system (0 = no bound). ``canary`` sends a share of its
    requests another way.
    """

    path: Annotated[list[BlockName], Field(min_length=1, max_length=limits.MAX_PATH_NODES)]
    canary: CanarySpec | None = None
    deadline_ms: Annotated[int, Field(ge=1, le=limits.MAX_DEADLINE_MS)] = limits.DEFAULT_DEADLINE_MS
    max_rows: Annotated[int, Field(ge=1, le=limits.MAX_ROWS)] | None = None
    check_finite: bool = True
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    priority: Annotated[int, Field(ge=0, le=9)] = 0
    max_batch_rows: Annotated[int, Field(ge=0, le=limits.MAX_ROWS)] = 0
    max_inflight_rows: Annotated[int, Field(ge=0, le=limits.MAX_ROWS)] = 0

    @property
    def paths(self) -> list[list[str]]:
        """Its path, and its canary's if there is one."""
        return [self.path] if self.canary is None else [self.path, self.canary.path]

    def share(self) -> dict[str, Any]:
        """The part of it that batching policies need."""
        return {
            "weight": self.weight,
            "priority": self.priority,
            "max_batch_rows": self.max_batch_rows,
        }


class LimitSpec(_Strict):
    """System-wide limits: ``max_rows`` per request."""

    max_rows: Annotated[int, Field(ge=1, le=limits.MAX_ROWS)] = limits.DEFAULT_MAX_ROWS
