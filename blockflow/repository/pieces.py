"""Pieces: blocks in the making. Written, read back, verified together, and only then stored.

A failure at any point leaves the repository as it was.
"""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from blockflow.core.errors import ExportError
from blockflow.core.model import Contract, Padding
from blockflow.repository.artifact import (
    count_state,
    one_thread,
    protect_input,
    read_artifact,
    write_artifact,
)
from blockflow.repository.manifest import (
    Chain,
    Manifest,
    Measured,
    PaddingForm,
    Source,
    contract_form,
)
from blockflow.repository.padding import check_padding, length_inputs
from blockflow.repository.probe import check_bindings, example_input
from blockflow.repository.report import BlockReport, ExportReport, Progress
from blockflow.repository.repository import BlockRepository
from blockflow.repository.sources import LoadedModel

Runner = Callable[[Tensor], Tensor]

_TOLERANCE: Mapping[str, float] = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 1e-2,
    "bfloat16": 5e-2,
}
"""Largest difference allowed, as a part of the largest reference value (at least 1)."""

_MEASURED_RUNS = 7


@dataclass(slots=True)
class Piece:
    """One block in the making.

    Attributes:
        name: of the block.
        stage: the module.
        contract: input and output.
        example: an input with at least two rows.
        part: what of the model it holds.
        position: in its path, from 1.
        of: length of the longest path.
        padding: what it promises of its input.
    """

    name: str
    stage: nn.Module
    contract: Contract
    example: Tensor
    part: str
    position: int
    of: int
    padding: Padding | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to store, where, and what it must equal.

    ``reference`` gives, for an input of the model, the expected output of each path (by its last
    block's name).
    """

    loaded: LoadedModel
    repository: BlockRepository
    pieces: Sequence[Piece]
    paths: Sequence[Sequence[str]]
    reference: Callable[[Tensor], Mapping[str, Tensor]]
    format: str
    version: str
    progress: Progress


def store_pieces(job: Job) -> ExportReport:
    """Write, verify and store all pieces.

    Raises:
        ExportError: EXPORT_FAILED, EXPORT_MISMATCH.
    """
    with tempfile.TemporaryDirectory(prefix="blockflow-export-") as folder, one_thread():
        files: dict[str, Path] = {}
        runners: dict[str, Runner] = {}
        for i, piece in enumerate(job.pieces):
            job.progress(f"exporting {piece.name}", i / len(job.pieces) * 0.6)
            files[piece.name] = Path(folder) / f"{i}.artifact"
            runners[piece.name] = _write(piece, job.format, files[piece.name])
        job.progress("verifying", 0.6)
        errors = _verify(job, runners)
        paddings = _verify_padding(job, runners)
        reports = []
        times = []
        for i, piece in enumerate(job.pieces):
            job.progress(f"measuring {piece.name}", 0.8 + i / len(job.pieces) * 0.15)
            times.append(_measure(runners[piece.name], piece))
        job.progress("storing", 0.95)
        for piece, ms in zip(job.pieces, times, strict=True):
            manifest = _manifest(job, piece, ms, paddings.get(piece.name))
            info = job.repository.save(manifest, files[piece.name])
            reports.append(
                BlockReport(
                    name=piece.name,
                    part=piece.part,
                    input=str(info.contract.input),
                    output=str(info.contract.output),
                    parameters=info.parameters,
                    state_bytes=info.state_bytes,
                    ms=ms,
                    output_bytes=piece.contract.output.row_bytes(),
                    sha256=info.digest,
                    file_bytes=files[piece.name].stat().st_size,
                    padding_error=None if manifest.padding is None else manifest.padding.error,
                )
            )
    job.progress("done", 1.0)
    return ExportReport(
        job.loaded.label,
        job.format,
        tuple(reports),
        tuple(tuple(path) for path in job.paths),
        errors,
    )


def _write(piece: Piece, format_: str, file: Path) -> Runner:
    try:
        piece.stage = protect_input(piece.stage, piece.example)
        write_artifact(piece.stage, piece.contract.input, piece.example, format_, file)
        return read_artifact(file, format_)
    except ExportError as e:
        e.where = e.where or piece.name
        raise
    except Exception as e:
        raise ExportError(
            "EXPORT_FAILED",
            f"the artifact cannot be read back: {type(e).__name__}: {str(e)[:300]}",
            where=piece.name,
        ) from e


def _verify(job: Job, runners: Mapping[str, Runner]) -> dict[str, float]:
    """Every path equals the reference, for several numbers of rows and each range's ends."""
    errors: dict[str, float] = {}
    for binding in check_bindings(job.loaded.input):
        x = example_input(job.loaded.input, binding, int_below=job.loaded.int_below, seed=1)
        dims = "x".join(str(d) for d in x.shape)
        with torch.no_grad():
            expected = job.reference(x)
            made = _walk(job, runners, x)
            for path in job.paths:
                _, y = made[path[-1]]
                error = _difference(job, path, y, expected[path[-1]])
                errors[dims] = max(errors.get(dims, 0.0), error)
    return errors


def _verify_padding(job: Job, runners: Mapping[str, Runner]) -> dict[str, PaddingForm]:
    """What each block that promises padding keeps of it, on what it gets in its path."""
    model = job.loaded
    if model.padding is None:
        return {}
    inputs = length_inputs(model.input, model.padding, int_below=model.int_below)
    with torch.no_grad():
        walks = [_walk(job, runners, x) for x in inputs]
    forms: dict[str, PaddingForm] = {}
    for piece in job.pieces:
        padding = piece.padding
        if padding is None:
            continue
        allowed = _TOLERANCE.get(piece.contract.output.dtype, 0.0)

        def run(x: Tensor, name: str = piece.name) -> Tensor:
            return _step(job, runners[name], name, x)

        pairs = [made[piece.name] for made in walks]
        error = check_padding(run, piece.contract, padding, pairs, _scaled, allowed, piece.name)
        forms[piece.name] = PaddingForm(
            dim=padding.dim, value=padding.value, error=error, tolerance=allowed
        )
    return forms


def _walk(job: Job, runners: Mapping[str, Runner], x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Run every path on one input of the model: each block's input and output."""
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for path in job.paths:
        y = x
        for name in path:
            if name not in made:
                made[name] = y, _step(job, runners[name], name, y)
            y = made[name][1]
    return made


def _scaled(y: Tensor, expected: Tensor) -> float:
    """Largest difference, as a part of the largest expected value (at least 1)."""
    scale = max(1.0, float(expected.double().abs().max()))
    return float((y.double() - expected.double()).abs().max()) / scale


def _step(job: Job, run: Runner, name: str, x: Tensor) -> Tensor:
    writes = x._version
    try:
        y = run(x)
    except Exception as e:
        text = str(e).strip().splitlines()
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the stored block fails on {list(x.shape)}: {type(e).__name__}: "
            f"{text[-1][:300] if text else ''}",
            where=name,
            hint=f"format {job.format} may have fixed a dim that the contract calls dynamic",
        ) from e
    if x._version != writes:
        raise ExportError("EXPORT_MISMATCH", "the stored block writes into its input", where=name)
    return y


def _difference(job: Job, path: Sequence[str], y: Tensor, expected: Tensor) -> float:
    where = " -> ".join(path)
    if y.shape != expected.shape or y.dtype != expected.dtype:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the blocks give {y.dtype}{list(y.shape)}, "
            f"the model {expected.dtype}{list(expected.shape)}",
            where=where,
        )
    error = float((y.double() - expected.double()).abs().max())
    scale = max(1.0, float(expected.double().abs().max()))
    allowed = _TOLERANCE.get(str(y.dtype).removeprefix("torch."), 0.0) * scale
    # a NaN compares false with everything: "not <=" refuses it
    if not error <= allowed:
        raise ExportError(
            "EXPORT_MISMATCH",
            f"the blocks differ from the model by {error:.3g}, allowed is {allowed:.3g}",
            where=where,
            hint="does the model draw random numbers, or keep state between calls?",
        )
    return error


def _measure(run: Runner, piece: Piece) -> float:
    """Median milliseconds of one row."""
    x = piece.example[:1].contiguous()
    times = []
    with torch.inference_mode():
        for _ in range(_MEASURED_RUNS + 2):
            start = time.perf_counter()
            run(x)
            times.append((time.perf_counter() - start) * 1e3)
    return round(median(times[2:]), 4)


def _manifest(job: Job, piece: Piece, ms: float, padding: PaddingForm | None) -> Manifest:
    parameters, state_bytes = count_state(piece.stage)
    return Manifest(
        name=piece.name,
        version=job.version,
        format=job.format,
        artifact="unset",
        sha256="0" * 64,
        size=0,
        contract=contract_form(piece.contract),
        parameters=parameters,
        state_bytes=state_bytes,
        measured=Measured(ms=ms, output_bytes=piece.contract.output.row_bytes()),
        source=Source(
            model=job.loaded.label,
            part=piece.part,
            weights_sha256=job.loaded.weights_sha256,
            seed=job.loaded.seed,
        ),
        chain=Chain(model=job.loaded.label, position=piece.position, of=piece.of),
        padding=padding,
        tools=tools(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def tools() -> dict[str, str]:
    """Versions that a manifest records."""
    try:
        own = version("blockflow")
    except PackageNotFoundError:  # run from a source tree
        own = "source"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "blockflow": own,
    }
