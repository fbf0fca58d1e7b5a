"""Energy per inference (thesis, figure 4.10): figures, the line that is said, picture. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blockflow.bench.canvas import new_page
from blockflow.bench.pipeline_figures import TENSORMQ, ZEROMQ
from blockflow.bench.results import Figure, interval_figure
from blockflow.bench.thesis.bars import WAY_COLOURS, draw_line
from blockflow.bench.thesis.beside import Rounds, known, quoted, thesis

ENERGY = "energy per tensor"
ABOVE = "energy per tensor above idle"
IDLE = "power when idle"
RATIO = "energy per tensor, to tensormq"

THESIS_MJ: Mapping[str, float] = {TENSORMQ: 710.0, ZEROMQ: 1920.0}
"""With one row; the other batch sizes are in a picture only."""

_SOURCE = "figure 4.10"
_THESIS_RATIO = 2.71


@dataclass(frozen=True, slots=True)
class Visit:
    """One client that asked in turn.

    Attributes:
        rows: answered.
        joules: of the counted part of the machine, whatever it did besides.
        idle_w: power of that part in the same round with nothing asked.
    """

    rows: int
    seconds: float
    joules: float
    idle_w: float

    @property
    def mj(self) -> float:
        """Millijoules per row."""
        return 1e3 * self.joules / self.rows

    @property
    def mj_above_idle(self) -> float:
        """What would have been spent anyway is left out; noise can make it negative."""
        return 1e3 * (self.joules - self.idle_w * self.seconds) / self.rows


class Energy:
    """What was found.

    Args:
        visits: (arm, rows per request) -> visits, one per round.
    """

    def __init__(
        self, visits: Mapping[tuple[str, int], Sequence[Visit]], labels: Mapping[str, Any]
    ) -> None:
        self._visits = visits
        self._labels = labels
        self.batches = sorted({rows for _, rows in visits})

    def rounds(self, batch: int) -> Rounds:
        """Millijoules per row, by arm."""
        return Rounds(
            {arm: [v.mj for v in f] for (arm, b), f in self._visits.items() if b == batch}
        )

    def figures(self) -> list[Figure]:
        """Per way and batch; then how the ways compare."""
        out: list[Figure] = []
        for (way, batch), found in self._visits.items():
            printed = THESIS_MJ.get(way) if batch == 1 else None
            whole = [v.mj for v in found]
            figure = interval_figure(ENERGY, way, batch, whole, "mJ", self._labels)
            out.append(thesis(figure, printed, _SOURCE))
            above = [v.mj_above_idle for v in found]
            out.append(interval_figure(ABOVE, way, batch, above, "mJ", self._labels))
        for batch in self.batches:
            rounds = self.rounds(batch)
            labels = {**self._labels, "noise": rounds.noise}
            figure = interval_figure(
                RATIO, ZEROMQ, batch, rounds.ratio(TENSORMQ, ZEROMQ), "x", labels
            )
            out.append(thesis(figure, _THESIS_RATIO if batch == 1 else None, _SOURCE))
        # A round's is given to each of its visits.
        idle = [v.idle_w for v in next(iter(self._visits.values()))]
        out.append(interval_figure(IDLE, "idle", None, idle, "W", self._labels))
        return out

    def says(self) -> str:
        """One line."""
        batch = self.batches[0]
        rounds = self.rounds(batch)
        handles, whole = rounds.median(TENSORMQ).value, rounds.median(ZEROMQ).value
        told = rounds.compared(TENSORMQ, ZEROMQ, "as much", "less")
        return (
            f"{handles:.0f} mJ per tensor with handles, {whole:.0f} with whole tensors "
            f"({batch} row{'s' * (batch > 1)}): {told}"
            + quoted(self._labels, f"{_THESIS_RATIO} times as much")
        )

    def draw(self) -> Any:
        """Energy per tensor by batch size, with intervals; the thesis's at one row."""
        page = new_page(7, 3.8)
        ax = page.subplots()
        for way, colour in WAY_COLOURS.items():
            found = [self.rounds(b).median(way) for b in self.batches]
            draw_line(ax, self.batches, found, color=colour, label=way, capsize=3)
            if known(self._labels):
                label = f"{way}, the thesis's"
                ax.plot([1], [THESIS_MJ[way]], "_", color=colour, ms=14, label=label)
        ax.set(xscale="log", xlabel="rows per request", ylabel="mJ per row")
        ax.set_xticks(self.batches, [str(b) for b in self.batches])
        ax.minorticks_off()
        ax.set_ylim(bottom=0)
        ax.legend(fontsize=8, frameon=False)
        return page

    def rows(self) -> list[tuple[Any, ...]]:
        """All visits, for a file."""
        return [
            (way, batch, n, v.rows, round(v.seconds, 4), round(v.joules, 4), round(v.idle_w, 3))
            for (way, batch), found in self._visits.items()
            for n, v in enumerate(found)
        ]
