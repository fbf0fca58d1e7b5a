"""Pieces: blocks in the making. Written, read back, verified together, and only then stored.

A failure at any point leaves the repository as it was.
"""

from __future__ import annotations

import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

import torch

from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.repository.artifact import (
    count_state,
    one_thread,
    protect_input,
    read_artifact,
    write_artifact,
)
from blockflow.repository.job import Job, Piece, Runner
from blockflow.repository.manifest import (
    MAX_COUNT,
    Chain,
    Manifest,
    Measured,
    PaddingForm,
    Source,
    as_text,
    new_manifest,
)
from blockflow.repository.report import BlockReport, ExportReport
from blockflow.repository.scratch import scratch
from blockflow.repository.trace import refuse_open_forward
from blockflow.repository.verify import verify_padding, verify_results, verify_served

_MEASURED_RUNS = 7


def store_pieces(job: Job) -> ExportReport:
    """Write, verify and store all pieces.

    Raises:
        ExportError: EXPORT_FAILED, EXPORT_MISMATCH, VERSION_EXISTS.
        SystemError_: NO_SPACE, for temporary files or in the repository.
    """
    job.repository.sweep()
    with scratch() as folder, one_thread():
        files: dict[str, Path] = {}
        runners: dict[str, Runner] = {}
        for i, piece in enumerate(job.pieces):
            job.progress(f"exporting {piece.name}", i / len(job.pieces) * 0.6)
            files[piece.name] = folder / f"{i}.artifact"
            runners[piece.name] = _write(piece, job.format, files[piece.name])
        job.progress("verifying", 0.6)
        errors = verify_results(job, runners)
        if job.serving is not None:
            verify_served(job, runners, job.serving, files)
        paddings = verify_padding(job, runners)
        times = []
        for i, piece in enumerate(job.pieces):
            job.progress(f"measuring {piece.name}", 0.8 + i / len(job.pieces) * 0.15)
            times.append(_measure(runners[piece.name], piece))
        job.progress("storing", 0.95)
        manifests = [
            _manifest(job, piece, ms, paddings.get(piece.name))
            for piece, ms in zip(job.pieces, times, strict=True)
        ]
        infos = job.repository.save_all(
            [(manifest, files[manifest.name]) for manifest in manifests],
            replace_stored=job.replace_stored,
        )
        reports = tuple(
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
                notes=piece.notes,
            )
            for piece, ms, manifest, info in zip(job.pieces, times, manifests, infos, strict=True)
        )
    job.progress("done", 1.0)
    return ExportReport(
        job.loaded.label,
        job.format,
        reports,
        tuple(tuple(path) for path in job.paths),
        errors,
        tuple(job.partial),
    )


def _write(piece: Piece, format_: str, file: Path) -> Runner:
    try:
        if format_ == "pt2":
            refuse_open_forward(piece.stage, piece.name)
        piece.stage = protect_input(piece.stage, piece.example)
        spec, example = piece.contract.input, piece.example
        piece.notes = write_artifact(piece.stage, spec, example, format_, file)
        return read_artifact(file, format_)
    except BlockFlowError as e:
        e.where = e.where or piece.name
        raise
    except Exception as e:
        raise ExportError(
            "EXPORT_FAILED",
            f"the artifact cannot be read back: {type(e).__name__}: {str(e)[:300]}",
            where=piece.name,
        ) from e


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
    label = as_text(job.loaded.label)
    return new_manifest(
        piece.name,
        job.format,
        piece.contract,
        version=job.version,
        parameters=parameters,
        state_bytes=state_bytes,
        measured=Measured(ms=ms, output_bytes=min(piece.contract.output.row_bytes(), MAX_COUNT)),
        source=Source(
            model=label,
            part=as_text(piece.part),
            weights_sha256=job.loaded.weights_sha256,
            seed=job.loaded.seed,
        ),
        chain=Chain(model=label, position=piece.position, of=piece.of),
        padding=padding,
        int_below=piece.int_below,
        tools=tools(),
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
