"""StageFacts: what a policy may know of a stage: its limits, its variable dim, its profile."""

from __future__ import annotations

from dataclasses import dataclass

from blockflow.core import limits
from blockflow.core.dims import Dim, names_in, size_of, substituted
from blockflow.core.launchspec import StageSpec
from blockflow.core.measuring import Subject
from blockflow.core.model import ROWS, BlockInfo
from blockflow.core.profile import StageProfile

LENGTH = "length"
"""What the variable dim is called in :attr:`StageFacts.carries`, whatever the block calls it."""


def variable_dim(block: BlockInfo) -> str | None:
    """The dim whose value is the length of what a block takes: the one that it may be padded along,
    else the first dynamic one; None for fixed dims."""
    if block.padding is not None:
        return block.padding.dim
    return next(iter(block.contract.input.dynamic), None)


def carries(block: BlockInfo) -> Dim:
    """The length of what a block gives, of :data:`LENGTH`, that of what it takes. One that is not
    told by that alone (an image's height times its width) is taken for the same."""
    name = variable_dim(block)
    for dim in block.contract.output.dims[1:]:
        if name is not None and names_in(dim) == (name,):
            return substituted(dim, {name: LENGTH})
    return LENGTH


def length_of(dim: Dim, length: int) -> int:
    """What a formula of :data:`LENGTH` makes of a length; 1 at least."""
    return length if dim == LENGTH else max(1, size_of(dim, {LENGTH: length}))


@dataclass(frozen=True, slots=True)
class StageFacts:
    """One stage as a policy sees it.

    Attributes:
        block: its name, for findings.
        max_rows: rows of the largest batch that the worker is laid out for; None = not known.
        exported_rows: of the largest that the block computes; no topology raises it.
        threads: intra-op threads that it runs with (which column of the profile counts).
        profile: times measured with these threads; None when the repository holds no fresh ones.
        length_dims: where the variable dim (a sequence's length) stands in a query's shape: the
            one that the block may be padded along, else its first; empty for fixed dims.
        lengths: its smallest and largest value.
        carries: the length of what the stage gives, by :func:`carries`.
        pads: the block promises that padding along that dim changes no result.
        subject: what measures it, where it is not the plain block.
    """

    block: str = ""
    max_rows: int | None = None
    threads: int = 1
    profile: StageProfile | None = None
    length_dims: tuple[int, ...] = ()
    lengths: tuple[int, int] = (1, limits.MAX_DIM)
    pads: bool = False
    carries: Dim = LENGTH
    subject: Subject | None = None
    exported_rows: int = limits.MAX_ROWS

    @classmethod
    def of(cls, spec: StageSpec, threads: int = 1) -> StageFacts:
        """From a launch's stage. Of its profile only the part for ``threads`` is taken: all that a
        change of the policy brings, too, so that facts that are the same are seen to be.

        Raises:
            ValueError: the attached profile is not one.
        """
        taken, name = spec.block.contract.input, variable_dim(spec.block)
        profile = None
        if spec.profile is not None:
            profile = StageProfile.from_dict(spec.profile).only(threads)
        anything = (1, limits.MAX_DIM)
        return cls(
            block=spec.block.name,
            max_rows=spec.max_rows,
            threads=threads,
            profile=profile if profile is not None and profile.points else None,
            length_dims=tuple(i for i, d in enumerate(taken.dims[1:]) if d == name),
            lengths=anything if name is None else taken.ranges.get(name, anything),
            pads=spec.block.padding is not None,
            carries=carries(spec.block),
            subject=Subject((spec.block.name,), spec.engine, spec.precision, spec.options),
            exported_rows=taken.ranges.get(ROWS, (1, limits.MAX_ROWS))[1],
        )

    def length(self, shape: tuple[int, ...]) -> int | None:
        """The variable dim's value in ``shape``; None for fixed dims."""
        dims = self.length_dims
        return shape[dims[0]] if dims and dims[0] < len(shape) else None

    def carried(self, length: int | None) -> int | None:
        """The length of what the stage gives for one that it takes; None stays None."""
        return None if length is None else length_of(self.carries, length)
