"""The pipeline computing time with one synchronous client (figure 4.3).

HTTP serves the whole model, so its time is a round trip; the other ways' is the sum over the blocks
(eq. 4.1), as in the thesis, with the round trip beside it.
"""

from __future__ import annotations

from collections.abc import Mapping

from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ, Sample
from blockflow.bench.results import Figure, interval_figure, latency_figure
from blockflow.bench.thesis.bars import draw_bars
from blockflow.bench.thesis.beside import AGAIN, Rounds, beside_grid, quoted, thesis
from blockflow.bench.thesis.experiment import Context, Data, Experiment, Findings, Plot, Settings
from blockflow.bench.thesis.offline_table import OFFLINE_SUM_MS
from blockflow.bench.thesis.one_client import (
    HTTP,
    HTTP_JSON,
    OFFLINE,
    Series,
    by_all_ways,
    pipeline_ms,
)

TIME, ROUND_TRIP, RATIO = "pipeline computing time", "round trip", "ratio"

_SOURCE = "figure 4.3"
_TEXT = "text of figure 4.3"
ZEROMQ_MS = 44.9
TENSORMQ_MS = 16.0
"""The text: 2.8 times less than ZeroMQ's 44.9 ms."""

_THESIS: Mapping[str, float] = {
    HTTP: 200.0,
    ZEROMQ: ZEROMQ_MS,
    TENSORMQ: TENSORMQ_MS,
    OFFLINE: OFFLINE_SUM_MS,
}
_RATIOS: Mapping[tuple[str, str], float | None] = {
    (TENSORMQ, ZEROMQ): 2.8,
    (TENSORMQ, HTTP): 11.0,
    (TENSORMQ, HTTP_JSON): None,
    (OFFLINE, TENSORMQ): round(TENSORMQ_MS / OFFLINE_SUM_MS, 2),
}
"""(base, way) -> the thesis's way / base."""


def run(context: Context) -> Findings:
    def done(found: Mapping[int, Series]) -> Findings:
        return findings(found[1], context.settings)

    rounds = context.pick(80, 6)
    return by_all_ways(context, "one inference by each way", {1: 1}, rounds, done, http=True)


def _time(sample: Sample) -> float:
    """A round trip where no more is known."""
    return pipeline_ms(sample) if sample.hops else sample.total


def findings(found: Series, settings: Settings) -> Findings:
    """Figures, tables, plot and the line. Pure."""
    times, trips = found.rounds(_time), found.rounds(lambda s: s.total)
    figures: list[Figure] = []
    for way in times.samples:
        if not way.endswith(AGAIN):
            made = latency_figure(TIME, way, 1, times.of(way), settings.labels)
            note = "round trip of the whole model" if way in (HTTP, HTTP_JSON) else ""
            figures.append(thesis(made, _THESIS.get(way), _SOURCE, note))
    for way in (ZEROMQ, TENSORMQ):
        made = latency_figure(ROUND_TRIP, way, 1, trips.of(way), settings.labels)
        note = "computing time + 2 ms"
        figures.append(thesis(made, _THESIS[way] + 2.0, "text of section 4.2.1", note))
    ratios = []
    for (base, way), printed in _RATIOS.items():
        labels = {**settings.labels, "noise": times.noise}
        made = interval_figure(f"{way} / {base}", RATIO, 1, times.ratio(base, way), "x", labels)
        ratios.append(thesis(made, printed, _TEXT))
    return Findings(
        says=_says(times, settings),
        figures=[*figures, *ratios],
        tables=[
            beside_grid("Figure 4.3: pipeline computing time", figures),
            beside_grid("Figure 4.3: ratios", ratios),
        ],
        plots=[
            Plot(
                "Figure 4.3: pipeline computing time",
                "time",
                draw_bars([f for f in figures if f.name == TIME], "ms", group=lambda f: f.mode),
            )
        ],
        data=[
            Data(
                "inferences",
                ("way", "round", "computing_ms", "round_trip_ms"),
                [
                    (way, i, _time(s), s.total)
                    for way, samples in found.samples.items()
                    for i, s in enumerate(samples)
                ],
            )
        ],
        notes=[
            "HTTP: the whole model behind CherryPy. The tensor's bytes are its body; in the JSON "
            "form it is nested lists of numbers. Which of them the thesis sent is not said.",
            "ZeroMQ: whole tensors are raw message frames here; the thesis pickles them.",
        ],
    )


def _says(times: Rounds, settings: Settings) -> str:
    def beside(way: str) -> str:
        printed = f"{_RATIOS[TENSORMQ, way]:g} times slower"
        return times.compared(TENSORMQ, way) + quoted(settings.labels, printed)

    return (
        f"beside handles, whole tensors are {beside(ZEROMQ)}, "
        f"the whole model by HTTP {beside(HTTP)}; "
        f"beside the offline sum, handles are {times.compared(OFFLINE, TENSORMQ)}"
    )


EXPERIMENT = Experiment(
    "pipeline",
    (_SOURCE,),
    "Pipeline time with one client: HTTP, whole tensors, handles, offline sum",
    run,
)
