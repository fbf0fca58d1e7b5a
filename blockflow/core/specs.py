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
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Mode = Literal["tensormq", "zeromq"]
Transport = Literal["ipc", "tcp"]


def _planned(most: int) -> PlainValidator:
    """A number up to ``most``, or ``auto``."""

    def check(value: Any) -> int | str:
        if value == AUTO or (type(value) is int and 1 <= value <= most):
            return value
        raise ValueError(f'expected "auto" or a number from 1 to {most}')

    return PlainValidator(check)


def _planned_schema(most: int) -> WithJsonSchema:
    number = {"type": "integer", "minimum": 1, "maximum": most}
    return WithJsonSchema({"anyOf": [{"const": AUTO}, number]})


Threads = Annotated[int | Literal["auto"], _planned(MAX_THREADS), _planned_schema(MAX_THREADS)]
"""Intra-op threads: a number, or planned over all workers (:mod:`blockflow.core.threads`)."""

Lanes = Annotated[
    int | Literal["auto"], _planned(limits.MAX_LANES), _planned_schema(limits.MAX_LANES)
]
"""Forwards that a worker may compute at once: a number, or planned with the threads."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PolicySpec(BaseModel):
    """A batching policy by name; its options are checked by the policy itself."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    policy: Annotated[Name, Field(description="the policy's name")] = "none"


class BlockSpec(_Strict):
    """One block of a topology. The OpenAPI document is made of the descriptions."""

    name: Annotated[BlockName, Field(description="the block's name in this topology")]
    block: Annotated[
        BlockName | None, Field(description="its name in the repository, when it differs")
    ] = None
    version: Annotated[
        Version | None, Field(description="one of its versions, as name@version; null = current")
    ] = None
    digest: Annotated[
        Digest | None,
        Field(description="sha256 of the artifact that is meant; null = what its name means now"),
    ] = None
    device: Annotated[
        str, Field(pattern=r"^(cpu|cuda:(0|[1-9][0-9]?))$", description="cpu or cuda:N")
    ] = "cpu"
    replicas: Annotated[
        int, Field(ge=1, le=limits.MAX_REPLICAS, description="processes of this block")
    ] = 1
    threads: Annotated[
        Threads, Field(description="intra-op threads of a forward; auto = planned")
    ] = AUTO
    lanes: Annotated[
        Lanes, Field(description="forwards that its worker computes at once; auto = planned")
    ] = AUTO
    cores: Annotated[
        Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None,
        Field(description="cpu numbers that it may use; null = all of the system's"),
    ] = None
    engine: Annotated[Name, Field(description="what computes; auto = chosen")] = AUTO
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16", "int8"],
        Field(description="what it computes in; auto = chosen with the engine"),
    ] = AUTO
    batching: Annotated[
        PolicySpec, Field(description="batching policy by name, or with its options")
    ] = PolicySpec()
    mode: Annotated[
        Mode | None, Field(description="handles or whole tensors; null = as the topology says")
    ] = None
    worker: Annotated[
        Name | None,
        Field(description="worker that hosts it; blocks with the same one share a process"),
    ] = None
    max_rows: Annotated[
        Annotated[int, Field(ge=1, le=limits.MAX_ROWS)] | None,
        Field(description="rows of the largest batch; null = as the topology says"),
    ] = None
    slots: Annotated[
        int,
        Field(
            ge=1,
            le=4096,
            description="tensors that it may have out at once; its worker has those of its blocks "
            "together, and two at least",
        ),
    ] = 16
    arena_mib: Annotated[
        Annotated[int, Field(ge=1, le=1024 * 1024)] | None,
        Field(description="memory of these, MiB; null = from its contract"),
    ] = None
    timeout_ms: Annotated[
        int, Field(ge=0, le=3_600_000, description="longest time of one forward, ms; 0 = none")
    ] = 0
    replayable: Annotated[
        bool,
        Field(description="false: not run twice on one request, not even when a worker died"),
    ] = True
    options: Annotated[dict[str, Any], Field(description="the engine's own options")] = Field(
        default_factory=dict
    )

    @field_validator("batching", mode="before")
    @classmethod
    def _policy_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"policy": value}
        if not isinstance(value, dict | PolicySpec):
            raise ValueError('expected a policy\'s name, or {"policy": NAME, ...its options}')
        return value

    @model_validator(mode="after")
    def _one_version(self) -> BlockSpec:
        stored = self.block or self.name
        if self.version is not None and "@" in stored:
            raise ValueError(f"{stored!r} has a version of its own beside {self.version!r}")
        named, at, _ = self.name.partition("@")
        if at and named == self.artifact.partition("@")[0] and self.name != self.artifact:
            raise ValueError(
                f"{self.name!r} would be {self.artifact!r}, not the version that it names: "
                "leave 'block' out, or take another name"
            )
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

    path: Annotated[
        list[BlockName],
        Field(min_length=1, max_length=limits.MAX_PATH_NODES, description="the other path"),
    ]
    share: Annotated[float, Field(ge=0, le=1, description="part of the requests that take it")]


class TaskSpec(_Strict):
    """A task: its path, what its requests may ask, and its share of blocks that others use too.

    While several tasks of one ``priority`` wait at a block, their rows run in proportion to
    ``weight``; a higher priority runs first. ``max_batch_rows`` bounds the task's rows in a batch,
    ``max_inflight_rows`` those in the whole system (0 = no bound). ``canary`` sends a share of its
    requests another way. ``cpu_latency_us`` keeps idle cores from deep sleep while its requests are
    under way (:mod:`blockflow.dispatcher.wakefulness`).
    """

    path: Annotated[
        list[BlockName],
        Field(min_length=1, max_length=limits.MAX_PATH_NODES, description="its blocks, in order"),
    ]
    canary: Annotated[CanarySpec | None, Field(description="another path to try; null = none")] = (
        None
    )
    deadline_ms: Annotated[
        int,
        Field(ge=1, le=limits.MAX_DEADLINE_MS, description="for requests that name none, ms"),
    ] = limits.DEFAULT_DEADLINE_MS
    max_rows: Annotated[
        Annotated[int, Field(ge=1, le=limits.MAX_ROWS)] | None,
        Field(description="rows of the largest request; null = as its blocks allow"),
    ] = None
    check_finite: Annotated[bool, Field(description="refuse NaN and infinity")] = True
    weight: Annotated[
        float, Field(ge=0.001, le=1000, description="share of blocks that other tasks use too")
    ] = 1.0
    priority: Annotated[int, Field(ge=0, le=9, description="the higher one runs first")] = 0
    max_batch_rows: Annotated[
        int, Field(ge=0, le=limits.MAX_ROWS, description="rows of it in one batch; 0 = no bound")
    ] = 0
    max_inflight_rows: Annotated[
        int,
        Field(ge=0, le=limits.MAX_ROWS, description="rows of it under way at once; 0 = no bound"),
    ] = 0
    cpu_latency_us: Annotated[
        Annotated[int, Field(ge=0, le=limits.MAX_CPU_LATENCY_US)] | None,
        Field(
            description="while its requests are under way, a core that idles wakes within so many "
            "microseconds; 0 = it does not sleep; null = as the system has it"
        ),
    ] = None

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

    max_rows: Annotated[
        int, Field(ge=1, le=limits.MAX_ROWS, description="rows of the largest request")
    ] = limits.DEFAULT_MAX_ROWS
