"""Plan: what ``make bench-batching`` runs: models, arms, loads, and how much of each. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from blockflow.bench.profiling.plan import Effort
from blockflow.core.model import TensorSpec
from blockflow.repository.zoo.catalog import ZOO

LBCI, LOAD, INPUT, OPERATOR, COST = "lbci", "load", "input", "operator", "cost"
SHARED, HEADS, SEVERAL = "shared", "heads", "several"
EXPERIMENTS = (LBCI, LOAD, INPUT, OPERATOR, SHARED, HEADS, SEVERAL, COST)
REASONS = "reasons"
"""In virtual time, and with a result file of its own: it is run by its name only."""


SERIAL, BATCHSIZE = "serial", "Batchsize(10)"
LBCI_ARM, DVABATCH = "LBCI", "DVABatch"
LOOSE = "LBCI, twice t_opt"
NONE = "none"
ZEROBATCH, DELAYBATCH = "ZeroBatch", "DelayBatch"
ZERO_CLASSES, DELAY_CLASSES = "ZeroBatch, classes", "DelayBatch, classes"
"""The same two windows with DVABatch's length classes: what is left beside them is the policy's."""
PLAIN, WITH_CLASSES = (ZEROBATCH, DELAYBATCH), (ZERO_CLASSES, DELAY_CLASSES)
DELAYED = {ZEROBATCH: DELAYBATCH, ZERO_CLASSES: DELAY_CLASSES}
"""A window without a delay -> the same with a tuned one."""

STATIC = 10
"""The static batch that LBCI is compared to."""

T_OPT_ROWS = 16
"""LBCI's bound in multiples of one sample's time. The paper has 500 ms and serves 20, but not 40
samples per second serially, so about 30 ms per sample."""

BOUND_ROWS = 30
"""The latency bound of a peak, in multiples of a query's mean time alone: a full batch that has
just begun and the next one, with something to spare."""

SHARED_BOUND_ROWS = 20
"""The same for the shared trunk, which computes on all cores."""

PER_TASK = 2
"""Requests of each task that the bound of the shared trunk computes at a time on a core; as many,
for every core, are under way when the deployments are saturated."""

GAP_ROWS = 3.3
"""Between the requests of a multi-sample test, likewise: the paper has 100 ms."""

LBCI_LOADS: Mapping[str, float] = {"1": 0.3, "2": 0.5, "3": 0.7, "4": 0.9}
"""Shares of what batches of the largest size reach. On a model whose time per sample halves in a
batch these are 0.6, 1.0, 1.4 and 1.8 of the serial capacity; the paper's 20, 40, 60 and 80 per
second are about 0.6, 1.2, 1.8 and 2.4 of its own."""

DVABATCH_LOADS: Mapping[str, float] = {"low": 0.3, "medium": 0.6, "high": 0.9}
"""Likewise."""

SIZES: Mapping[str, int] = {"small": 10, "medium": 25, "big": 50}
"""Multi-sample requests: uniformly from 1 to this many."""

LARGEST = 64
"""Rows that LBCI's blocks are laid out for: the largest request, and batches up to the bound."""

CLASSES = (16, 32, 64, 128, 256)
LENGTHS = "lognormal:median=24,sigma=0.9,max=256"
"""Long-tailed lengths: half of the sequences have at most 24 tokens, one in twenty over 105."""

DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0)
"""Windows of DelayBatch that are tried, in multiples of a query's mean time alone, the shortest
first. With 0 it is ZeroBatch again: where no delay helps, none is chosen."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A model of the zoo in blocks.

    Attributes:
        name: prefix of its blocks' names.
        model: in the zoo.
        cuts: submodules that begin a block.
        size: sides of the image where they are not the zoo's.
        longest: of the sequences, likewise.
        arguments: of the model's factory.
        rows, lengths: what is profiled; no rows: nothing is.
    """

    name: str
    model: str
    cuts: tuple[str, ...] = ()
    size: int | None = None
    longest: int | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    @property
    def blocks(self) -> tuple[str, ...]:
        return tuple(f"{self.name}-{i + 1}" for i in range(len(self.cuts) + 1))

    @property
    def input(self) -> TensorSpec:
        spec = ZOO[self.model].input
        if self.size is not None:
            return TensorSpec(spec.dtype, (*spec.dims[:2], self.size, self.size))
        if self.longest is not None:
            return TensorSpec(spec.dtype, spec.dims, {"length": (1, self.longest)})
        return spec

    def digest(self, code: bytes) -> str:
        """Of what its blocks come from: the recipe itself and the zoo's ``code``."""
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return hashlib.sha256(text + b"\0" + code).hexdigest()[:16]


ALEXNET = Recipe(
    "alexnet",
    "alexnet",
    ("features.3", "features.6", "features.10", "classifier", "classifier.4"),
    rows=(1, 2, 4, 8, 16, 32),
)
"""The convolutions in four blocks, the fully connected layers in two."""

RESNET18 = Recipe(
    "resnet18", "resnet18", ("layer2", "layer3", "layer4"), size=112, rows=(1, 2, 4, 8, 16)
)
ENCODER = Recipe(
    "encoder",
    "transformer",
    ("layers.1", "layers.2", "layers.3"),
    longest=256,
    arguments={"layers": 4, "max_length": 256},
    rows=(1, 2, 4, 8, 16),
    lengths=(16, 64, 256),
)
TRUNK = Recipe("resnet50", "resnet50", ("layer2", "layer3", "layer4"), size=160)
LATE = Recipe("late50", "resnet50", ("layer3", "layer4", "fc"), size=160)
WHOLE = Recipe("whole50", "resnet50", size=160)


@dataclass(frozen=True, slots=True)
class Diversity:
    """One of DVABatch's experiments.

    Attributes:
        bs_max: rows of a batch, of all arms.
        lengths: of the queries, in text form; '' where blocks have fixed dims.
        classes: of DVABatch and of the windows with classes; the papers' plain windows pad
            everything to the longest of a batch.
    """

    recipe: Recipe
    policies: tuple[str, ...]
    bs_max: int
    lengths: str = ""
    classes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        lbci: the model of that experiment.
        diversities: of DVABatch's.
        trunk, late, whole: the shared trunk with its head, the same model with but a classifier for
            a head, and as one block.
        tasks: that share the trunk.
        together: how many of them have their requests in one batch of it.
        parting: submodules where tasks could part, whose weights are told.
        repeats: visits of every arm at every load, in rotating order.
        stretch: where that decides nothing, at most so many times as many visits...
        spare_seconds: ...and no more than this for the further ones of one load.
        seconds: of arrivals per visit.
        probes: of each search for a peak, before its confirmation.
        probe_bounds: how long a probe is at least, in multiples of the latency bound: a queue that
            grows by a twentieth of what comes must outgrow the bound meanwhile.
        tests: of multi-sample requests per size.
        rounds: of requests one by one, per policy.
        patience: how often a visit that something else disturbed is repeated.
        simulated: queries of a simulated run of the reasons.
        rows_in_all_lanes: batches of a shared block that run side by side have the rows of one of
            the bound's together, not each.
        decisions: per policy.
        profile_again: whether each run measures them anew: bounds, t_opt and predictions come from
            them, and they are laid beside what is served in the same run.
        rate_limit: arrivals per second at most: what one sending thread can keep up with.
    """

    lbci: Recipe
    diversities: Mapping[str, Diversity]
    trunk: Recipe
    late: Recipe
    whole: Recipe
    tasks: int
    repeats: int
    seconds: float
    probes: int
    tests: int
    rounds: int
    decisions: int
    effort: Effort
    profile_again: bool = False
    stretch: int = 1
    spare_seconds: float = 0.0
    probe_bounds: float = 1.0
    patience: int = 0
    rate_limit: float = 500.0
    parting: tuple[str, ...] = ("layer4", "layer4.2", "fc")
    simulated: int = 10_000
    together: int = 8
    rows_in_all_lanes: bool = False

    @property
    def trunk_rows(self) -> int:
        """Of a full batch of the shared trunk."""
        return PER_TASK * self.together

    def parted_late(self) -> Plan:
        """The same for tasks that have but a classifier of their own. Batches are half as large,
        and all lanes together have as many rows: nearly all the memory is that of activations then,
        and a classifier takes few rows as it does many."""
        few = max(1, self.together // 2)
        return replace(self, trunk=self.late, together=few, rows_in_all_lanes=True)

    def probe_seconds(self, bound_ms: float) -> float:
        """Of a probe whose answers may take ``bound_ms``."""
        return max(1.5 * self.seconds, self.probe_bounds * bound_ms / 1e3)

    def recipes(self, chosen: Sequence[str]) -> list[Recipe]:
        """The models that these experiments need."""
        needed = {
            LBCI: [self.lbci],
            SHARED: [self.trunk, self.whole],
            HEADS: [self.late, self.whole],
            SEVERAL: [self.trunk, self.late, self.whole],
            COST: [self.diversities[LOAD].recipe],
            REASONS: [d.recipe for d in self.diversities.values()],
            **{name: [d.recipe] for name, d in self.diversities.items()},
        }
        return list({r.name: r for name in chosen for r in needed[name]}.values())


_DIVERSITIES = {
    LOAD: Diversity(RESNET18, ("load",), 16),
    INPUT: Diversity(ENCODER, ("load", "input"), 16, LENGTHS, CLASSES),
    OPERATOR: Diversity(ALEXNET, ("load", "operator"), 32),
}
FULL = Plan(
    ALEXNET,
    _DIVERSITIES,
    TRUNK,
    LATE,
    WHOLE,
    tasks=8,
    repeats=5,
    seconds=4.0,
    probes=5,
    tests=5,
    rounds=60,
    decisions=4000,
    effort=Effort(0.02, 9, 300, 0.6),
    profile_again=True,
    stretch=3,
    spare_seconds=120.0,
    probe_bounds=20.0,
    patience=2,
)
QUICK = Plan(
    ALEXNET,
    _DIVERSITIES,
    TRUNK,
    LATE,
    WHOLE,
    tasks=8,
    repeats=1,
    seconds=1.2,
    probes=2,
    tests=1,
    rounds=6,
    decisions=1000,
    effort=Effort(0.05, 3, 50, 0.1),
    probe_bounds=2.0,
    patience=1,
)

_DIGITS = Recipe("digits", "digits", ("head",), rows=(1, 4))
_WORDS = Recipe(
    "words",
    "transformer",
    ("head",),
    longest=32,
    arguments={"layers": 1, "width": 16, "heads": 2, "max_length": 32},
    rows=(1, 4),
    lengths=(8, 32),
)
TINY = Plan(
    _DIGITS,
    {
        LOAD: Diversity(_DIGITS, ("load",), 4),
        INPUT: Diversity(_WORDS, ("load", "input"), 4, "uniform:1-32", (8, 32)),
        OPERATOR: Diversity(_DIGITS, ("load", "operator"), 4),
    },
    _DIGITS,
    _DIGITS,
    Recipe("digit", "digits"),
    tasks=2,
    repeats=1,
    seconds=0.1,
    probes=1,
    tests=1,
    rounds=1,
    decisions=50,
    effort=Effort(0.5, 3, 3, 0.02),
    rate_limit=100.0,
    parting=("head",),
    simulated=60,
    together=2,
)
