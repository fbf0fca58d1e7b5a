"""Convert: make a further form (variant) of a stored block, verify it, and pin it in the manifest.

Every engine that is for the form gets a verdict of its own: one that differs from the reference may
not run it, and the others may. Where none may, nothing is stored.

What needs a framework (writing the form, running it) is given by the caller as a :class:`Workshop`;
the engine room has one. A failure at any point leaves the repository as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from blockflow.core.errors import BlockError, ExportError
from blockflow.core.model import ROWS, BlockInfo
from blockflow.repository.artifact import one_thread
from blockflow.repository.differences import Scale, tolerated
from blockflow.repository.machine import ENGINE_PACKAGES, fingerprint, version_of
from blockflow.repository.manifest import VariantForm, VerdictForm
from blockflow.repository.padding import length_inputs, only_padding
from blockflow.repository.pieces import tools
from blockflow.repository.probe import check_bindings, example_input
from blockflow.repository.report import Progress, silent
from blockflow.repository.repository import BlockRepository
from blockflow.repository.samples import Samples, seeded_samples
from blockflow.repository.scratch import scratch
from blockflow.repository.verdict import Pairs, Run, none_fit, padded_verdict, verdict

TOLERANCE: Mapping[str, float] = {"onnx": 1e-4, "aoti": 1e-4, "onnx-int8": 0.1}
"""Largest difference allowed, as a part of the largest reference value."""

MACHINE_BOUND = frozenset({"aoti"})
"""Variants that hold machine code."""

_COMPARED = 32
_PADDED = 4
_FARTHEST = 2**20
"""As numbers of things may be. 32 bits hold sums of such, and OpenVINO computes with no more."""


class Workshop(Protocol):
    """Makes variants and runs blocks."""

    def make(
        self, kind: str, block: BlockInfo, source: Path, samples: Sequence[Tensor], target: Path
    ) -> None:
        """Write the variant ``kind`` of the reference artifact ``source`` to ``target``."""

    def runners(
        self, kind: str | None, block: BlockInfo, file: Path
    ) -> AbstractContextManager[Mapping[str, Run]]:
        """Every engine that is here and is for that form (None: the artifact), by name.

        One that cannot load the file raises LOAD_FAILED when it is run.
        """


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """One variant that was made.

    Attributes:
        block, variant: which.
        digest, file_bytes: of the file.
        errors: engine that may run it -> largest difference to the reference, as a part of its
            largest value.
        refused: engines that are here and may not run it, with what was found.
        tolerance: what was allowed.
        checked: dims of the inputs that were compared.
        calibration: where the calibration's inputs came from; '' = none was needed.
        warning: what the reader should know; '' = nothing.
    """

    block: str
    variant: str
    digest: str
    file_bytes: int
    errors: dict[str, float]
    refused: dict[str, str]
    tolerance: float
    checked: tuple[str, ...]
    calibration: str
    warning: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON form."""
        return asdict(self)


def convert_block(
    repository: BlockRepository,
    name: str,
    kind: str,
    workshop: Workshop,
    *,
    samples: Samples | None = None,
    tolerance: float | None = None,
    progress: Progress = silent,
) -> ConvertReport:
    """Make one variant of one block.

    Args:
        repository: where the block is, and where the variant goes.
        name: the block.
        kind: a key of :data:`TOLERANCE`.
        workshop: what knows the frameworks.
        samples: inputs to calibrate ``onnx-int8`` with; None makes random ones, with a warning.
        tolerance: instead of the kind's own, or what half precision needs.
        progress: told what is being done.

    Raises:
        ExportError: EXPORT_FAILED when the form cannot be made, or no engine loads it;
            EXPORT_MISMATCH when none that does keeps within the tolerance.
        RepositoryError: as :class:`BlockRepository`.
        SystemError_: MISSING_EXTRA, NO_SPACE.
    """
    if kind not in TOLERANCE:
        raise ExportError(
            "EXPORT_FAILED",
            f"unknown variant {kind!r}",
            where=name,
            hint=f"known: {', '.join(TOLERANCE)}",
        )
    manifest = repository.manifest(name)
    block, below = manifest.to_info(), manifest.int_below
    calibrates = kind == "onnx-int8"
    if calibrates and samples is None:
        samples = seeded_samples(block.contract.input, int_below=below)
    given = list(samples.inputs) if samples is not None and calibrates else []
    dtypes = {block.contract.input.dtype, block.contract.output.dtype}
    usual = max(TOLERANCE[kind], *(tolerated(dtype, 0.0) for dtype in dtypes))
    allowed = usual if tolerance is None else tolerance
    repository.sweep()
    with scratch() as folder, one_thread():
        target = folder / f"{name}.{kind}"
        with repository.artifact(name, digest=block.digest) as source:
            progress(f"converting {name} to {kind}", 0.1)
            workshop.make(kind, block, source, given, target)
            progress(f"verifying {name}", 0.7)
            # real inputs were given to say what range counts: random ones lie outside of it
            real = samples is not None and not samples.seeded and calibrates
            inputs = _of_samples(given) if real else [*_checks(block, below), *given]
            with (
                workshop.runners(None, block, source) as reference,
                workshop.runners(kind, block, target) as made,
            ):
                (run,) = reference.values()
                expected = [run(x) for x in inputs]
                for x, y in () if real else _far(block, run):
                    inputs.append(x)
                    expected.append(y)
                checks = list(zip(inputs, expected, strict=True))
                lengths: list[tuple[Tensor, Tensor]] = []
                if block.padding is not None:
                    made_up = length_inputs(block.contract.input, block.padding, int_below=below)
                    lengths = [(x, run(x)) for x in (given[:_PADDED] if real else made_up)]
                empty, scale = _empty(block, run), Scale.exact(expected)
                verdicts = {
                    engine: _judge(block, made_run, checks, lengths, allowed)
                    for engine, made_run in made.items()
                }
                differ = {
                    engine: found
                    for engine, made_run in made.items()
                    if not verdicts[engine].refused
                    and (found := verdict(made_run, empty, allowed, scale).refused)
                }
        errors = {n: v.error for n, v in verdicts.items() if not v.refused and v.error is not None}
        refused = {n: v.refused for n, v in verdicts.items() if v.refused}
        if not errors:
            raise none_fit(name, kind, refused)
        progress(f"storing {name}", 0.95)
        form = VariantForm(
            file="unset",
            digest="0" * 64,
            bytes=0,
            machine=fingerprint() if kind in MACHINE_BOUND else "",
            error=max(errors.values()),
            tolerance=allowed,
            calibration=samples.origin if samples is not None and calibrates else "",
            tools={**tools(), **{p: v for p in ENGINE_PACKAGES if (v := version_of(p))}},
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            engines=verdicts,
        )
        info = repository.save_variant(name, kind, form, target, digest=block.digest)
    pinned = info.variants[kind]
    warnings = [
        f"of a row that is nothing but padding {engine} makes another result: it {found}"
        for engine, found in differ.items()
    ]
    if calibrates and samples is not None and samples.seeded:
        warnings.append("calibrated on random inputs: expect errors on real ones; give --calibrate")
    if block.choices.keys() - info.choices.keys():
        warnings.append(
            "the choice of its engine does not hold for this file, which is less exact or runs on "
            f"this machine only, and is forgotten; measure again: blockflow profile {name} --choose"
        )
    return ConvertReport(
        block=name,
        variant=kind,
        digest=pinned.digest,
        file_bytes=pinned.bytes,
        errors=errors,
        refused=refused,
        tolerance=allowed,
        checked=tuple(dict.fromkeys("x".join(map(str, x.shape)) for x in inputs)),
        calibration=form.calibration,
        warning="; ".join(warnings),
    )


def _checks(block: BlockInfo, int_below: int | None) -> Iterator[Tensor]:
    """1, 3 and 8 rows, the ends of every dynamic dim, and several rows of the largest."""
    spec = block.contract.input
    bindings = check_bindings(spec)
    if spec.dynamic:
        bindings.append({**{n: spec.ranges.get(n, (1, 64))[1] for n in spec.dynamic}, ROWS: 3})
    for i, binding in enumerate(bindings):
        yield example_input(spec, binding, int_below=int_below, seed=100 + i)


def _far(block: BlockInfo, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Integers far away from those of the other checks, and what they give, where the block takes
    such (a table of tokens does not): frameworks stop at the last number where torch begins anew,
    or divide in another way."""
    spec = block.contract.input
    dtype: torch.dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype is torch.bool:
        return
    span = torch.iinfo(dtype)
    for lowest in {0, max(span.min, -_FARTHEST)}:
        dims = spec.resolve({**check_bindings(spec)[0], ROWS: 8})
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(lowest, min(span.max, _FARTHEST) + 1, dims, generator=generator)
        with suppress(BlockError):
            y = run(x.to(dtype))
            if y.isfinite().all():
                yield x.to(dtype), y


def _empty(block: BlockInfo, run: Run) -> Pairs:
    """A row that is nothing but padding, where the reference makes numbers of it: attention over no
    position at all is what frameworks agree about least, and no length's promise depends on it."""
    if block.padding is None:
        return []
    x = only_padding(block.contract.input, block.padding)
    with suppress(BlockError):
        y = run(x)
        return [(x, y)] if y.isfinite().all() else []
    return []


def _of_samples(samples: Sequence[Tensor]) -> list[Tensor]:
    """1, 3 and 8 rows of the first, and the first few as they are."""
    first = samples[0]
    rows = [first[torch.arange(n) % len(first)] for n in (1, 3, 8)]
    return [*rows, *samples[:_COMPARED]]


def _judge(
    block: BlockInfo, run: Run, checks: Pairs, lengths: Pairs, allowed: float
) -> VerdictForm:
    found = verdict(run, checks, allowed)
    if block.padding is None or found.refused:
        return found
    return padded_verdict(run, block.contract, block.padding, lengths, allowed, found)
