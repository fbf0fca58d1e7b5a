"""Causes: why an exporter has refused a model, and what helps."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from blockflow.core.limits import MAX_ROWS
from blockflow.core.model import ROWS, TensorSpec
from blockflow.repository.spec_text import FEWEST_ROWS

GUARD = "satisfy the generated guard"
UNTOLD = "Cannot create Dim with inconsistent min"
"""What torch 2.13 fails with when it is about to tell a guard on a size taken from another (-a)."""

_CAUSES: Sequence[tuple[str, str]] = (
    (
        "torch.classes.quantized",
        "torch's quantised modules: export the model as it was before, then blockflow convert --to "
        "onnx-int8; or torchscript-traced, which takes those whose scales are fixed "
        "(quantize_dynamic() scales by all rows of a batch, which are several clients')",
    ),
    ("numpy", "the forward leaves torch for numpy: compute it with torch, or outside of the model"),
    (
        "node flex_attention",
        "a pt2 file holds no flex_attention: torch.nn.functional.scaled_dot_product_attention with "
        "an attn_mask (of numbers, added to the scores) computes the same",
    ),
    ("Failed serializing node", "make sizes of whole numbers: -(-n // 8), not math.ceil(n / 8)"),
    (
        "data-dependent",
        "control flow on tensor values must become torch.where or torch.cond, or move out of the "
        "model; nn.Transformer's parts look into masks unless told is_causal=True (tgt_is_causal)",
    ),
    (
        "specialized it to be a constant",
        "the forward makes a fixed number of a dim that the contract calls dynamic: by a branch on "
        "a size, a loop over it, len(), int() or tolist(); torchscript-scripted keeps loops and "
        "branches. Recurrent layers make one of their steps: with batch_first=True these are not "
        "the rows; torchscript-traced keeps any length",
    ),
    (
        "Constraints violated (rows)",
        "the forward takes another way for some numbers of rows, or none, as the guard says: do "
        "the same for all (torch.cdist() with compute_mode='donot_use_mm_for_euclid_dist')",
    ),
    (
        GUARD,
        "for some sizes the forward goes another way, or none, as the guard says: narrow --range",
    ),
)
"""What an exporter's message contains -> what the model does, and what helps."""

_MADE_OF = re.compile(r"no attribute '(\w+_(?:g|v|u|orig)|parametrizations)'")
"""What torch has beside a weight that is computed of it."""

_UNSCRIPTED = "Parametrization is not working with scripting"
"""What torch's own module says that such a weight was scripted with."""

_SUGGESTED = re.compile(r"^\s*(\w+) = Dim\('\w+'(?:, min=(\d+))?(?:, max=(\d+))?\)$", re.MULTILINE)
_ADVICE = re.compile(
    r"For more information, run with TORCH_LOGS=\S+|\nSuggested fixes:.*|\nThe error above .*",
    re.DOTALL,
)
"""To those who call torch.export themselves."""


def cause(e: Exception, spec: TensorSpec) -> str:
    """What in the model an exporter's message is about, and what helps; '' = not known.

    Args:
        spec: the input contract that it was to keep.
    """
    text = str(e)
    hint = next((hint for sign, hint in _CAUSES if sign in text), "")
    takes = [
        f"--range {name}={lo or spec.ranges.get(name, (1, MAX_ROWS))[0]}.."
        f"{hi or spec.ranges.get(name, (1, MAX_ROWS))[1]}"
        for name, lo, hi in _SUGGESTED.findall(text)
        if name in spec.dynamic or (name == ROWS and not lo and int(hi or MAX_ROWS) >= FEWEST_ROWS)
    ]
    return f"{hint}; it takes {' '.join(takes)}" if takes else hint


def of_computed_weights(e: BaseException) -> str:
    """A hint where a model fails since weights of it are computed of others; else ''. Those of a
    model that is loaded by its name are computed once, and what they were computed of is gone."""
    if _UNSCRIPTED in str(e):
        return (
            "torch scripts no weights that are computed of others: call torch.nn.utils.parametrize."
            "remove_parametrizations(module, name) before torch.jit.script(), or export the model "
            "unscripted"
        )
    asked = _MADE_OF.search(str(e)) if isinstance(e, AttributeError) else None
    if asked is None:
        return ""
    return (
        "weights that are computed of others (weight norm, spectral norm, parametrizations) are "
        f"computed once, after which there is no {asked[1]!r}: let the forward read the weight, or "
        "export from Python (docs/blocks.md), where a model stays as it is"
    )


def reason(e: Exception) -> str:
    """The message's first lines, and the line of the model's own code that led to it."""
    lines = [line.strip() for line in _ADVICE.sub("", str(e)).splitlines() if line.strip()]
    return " ".join(lines[:3])[:600] + _place(e)


def _place(e: Exception) -> str:
    """The innermost line of a forward that is neither torch's own nor generated."""
    foreign = (os.path.dirname(torch.__file__) + os.sep, "<")
    for at in reversed(traceback.extract_tb(e.__traceback__)):
        if at.name == "forward" and not at.filename.startswith(foreign):
            return f" ({Path(at.filename).name}, line {at.lineno}: {(at.line or '')[:120]})"
    return ""
