"""Verdict: whether one engine may run a variant, by what it makes of a block's inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite

from torch import Tensor

from blockflow.core.engines import AS_IT_IS, DIFFERS, UNLOADED, tolerable
from blockflow.core.errors import BlockFlowError, ExportError
from blockflow.core.model import Contract, Padding
from blockflow.repository.differences import Scale, difference
from blockflow.repository.manifest import VerdictForm
from blockflow.repository.padding import check_padding

Run = Callable[[Tensor], Tensor]
Pairs = Sequence[tuple[Tensor, Tensor]]
"""Inputs, and what the reference makes of them."""

_MOST_CHARS = 500
"""Of a reason: an engine's own message may be pages long."""


def verdict(run: Run, pairs: Pairs, allowed: float, scale: Scale | None = None) -> VerdictForm:
    """Compare an engine with the reference.

    Args:
        run: the engine; what it raises is typed.
        pairs: what it is compared on.
        allowed: largest difference, as of :func:`~blockflow.repository.differences.difference`.
        scale: what it is a part of; None: of what the reference makes of ``pairs``.
    """
    worst, dims = 0.0, ""
    scale = scale or Scale.exact(reference for _, reference in pairs)
    for x, reference in pairs:
        try:
            error = difference(run(x), reference, scale)
        except BlockFlowError as e:
            if e.code == "LOAD_FAILED":
                return _refused(f"{UNLOADED}{e.message}")
            return _refused(f"fails on {list(x.shape)}: {e.message}")
        if not isfinite(error):
            return _refused(f"{DIFFERS}{error} on {list(x.shape)}, allowed is {allowed:.3g}")
        if error > worst:
            worst, dims = error, str(list(x.shape))
    if worst <= allowed:
        return VerdictForm(error=worst)
    return _refused(f"{DIFFERS}{worst:.3g} on {dims}, allowed is {allowed:.3g}", worst)


def padded_verdict(
    run: Run,
    contract: Contract,
    padding: Padding,
    pairs: Pairs,
    allowed: float,
    unpadded: VerdictForm,
) -> VerdictForm:
    """The same of an engine that was found fit without padding: what the block promises of it, the
    engine has to keep."""
    differ = partial(difference, scale=Scale.exact(reference for _, reference in pairs))
    try:
        error = check_padding(run, contract, padding, pairs, differ, allowed, "")
    except BlockFlowError as e:
        return _refused(f"does not keep the promise of padding: {e.message}", unpadded.error)
    return VerdictForm(error=max(error, unpadded.error or 0.0))


def none_fit(block: str, kind: str, refused: Mapping[str, str]) -> ExportError:
    """The error where no engine may run the variant ``kind``, by what each is refused for."""
    why = "; ".join(f"{engine} {reason}" for engine, reason in refused.items())
    if all(reason.startswith(UNLOADED) for reason in refused.values()):
        told = f"no engine here runs it: {why}"
        return ExportError("EXPORT_FAILED", told, where=block, hint=AS_IT_IS)
    differ = any(reason.startswith(DIFFERS) for reason in refused.values())
    helps = [
        "give --calibrate with real inputs" if differ and kind == "onnx-int8" else "",
        "allow more with --tolerance" if any(map(tolerable, refused.values())) else "",
        AS_IT_IS,
    ]
    return ExportError(
        "EXPORT_MISMATCH",
        f"no engine here may run the converted block: {why}",
        where=block,
        hint=", or ".join(filter(None, helps)),
    )


def _refused(why: str, error: float | None = None) -> VerdictForm:
    cut = why if len(why) <= _MOST_CHARS else f"{why[: _MOST_CHARS - 3]}..."
    return VerdictForm(error=error, refused=cut)
