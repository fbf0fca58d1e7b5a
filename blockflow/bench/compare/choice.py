"""Which metrics are compared, and that there are any: a guard that compares nothing guards nothing.

Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from blockflow.bench.compare.judgement import Arm, Comparison, Metric
from blockflow.bench.options import nonsense
from blockflow.bench.pipeline_figures import HOP, LATENCY, ONE_WORKER, RATIO, TENSORMQ
from blockflow.bench.statistics import MIN_PAIRS
from blockflow.bench.worker_start import READY, USS
from blockflow.core.errors import BlockFlowError


def _any_of(*names: str) -> str:
    return f"({'|'.join(map(re.escape, names))})"


# From the names that the benchmark gives its figures: one that is renamed stays chosen.
ONLY = f"^({_any_of(RATIO, LATENCY, HOP)}, {_any_of(TENSORMQ, ONE_WORKER)}|{_any_of(READY, USS)}),"
"""Of the default benchmark. The more is compared, the more differs by chance."""

_SHOWN = 12


def chosen(values: Mapping[Metric, float], only: re.Pattern[str]) -> dict[Metric, float]:
    """Those that ``only`` finds in a metric's text."""
    return {metric: value for metric, value in values.items() if only.search(metric.text)}


def check_choice(measured: Mapping[Arm, Mapping[Metric, float]], only: re.Pattern[str]) -> None:
    """The first visits have shown what there is: is anything chosen that both arms have?

    Args:
        measured: all that each arm's benchmark writes.

    Raises:
        RequestError: INVALID_REQUEST; its hint names the tree's metrics.
    """
    found = {arm: chosen(measured[arm], only) for arm in Arm}
    if found[Arm.BASE].keys() & found[Arm.TREE].keys():
        return
    counts = " and ".join(f"{len(found[a])} of {len(measured[a])} in the {a}" for a in Arm)
    texts = [metric.text for metric in measured[Arm.TREE]]
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    raise nonsense(
        f"nothing to compare: of the metrics, {only.pattern!r} finds {counts}, none in both",
        "--only",
        f"the tree measures {'; '.join(texts[:_SHOWN]) or 'nothing'}{more}",
    )


def check_verdicts(found: Sequence[Comparison]) -> BlockFlowError | None:
    """INVALID_REQUEST where no metric has a verdict; None where one has."""
    if any(not c.note for c in found):
        return None
    return nonsense(
        f"nothing was compared: none of {len(found)} metrics has a verdict",
        hint=f"the remarks say why; a verdict needs {MIN_PAIRS} rounds that count (--rounds)",
    )
