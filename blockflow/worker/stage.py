"""Stage: what a worker knows of one of its blocks, with its engine and its figures."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from blockflow.core.fits import Fits
from blockflow.core.launchspec import StageSpec
from blockflow.core.metrics import Histogram, RateMeter, StageKpi
from blockflow.engine.base import Engine
from blockflow.worker.parting import spent
from blockflow.worker.ticket import Batch


class StageMeter:
    """Counters and histograms of one stage, kept by the data thread."""

    __slots__ = (
        "arrived",
        "batches",
        "busy",
        "bytes_out",
        "compute",
        "copies_out",
        "elements_in",
        "elements_padded",
        "expired",
        "failed",
        "failed_rows",
        "failures",
        "overhead",
        "requests",
        "rows",
        "served",
        "wait",
    )

    def __init__(self) -> None:
        self.requests = self.rows = self.batches = self.failures = self.expired = 0
        self.bytes_out = self.copies_out = 0
        self.elements_in = self.elements_padded = 0
        self.wait = Histogram()
        self.overhead = Histogram()
        self.compute = Histogram()
        self.arrived = RateMeter()
        self.served = RateMeter()
        self.failed = RateMeter()  # rows: they took their time as well
        self.failed_rows = 0
        self.busy = RateMeter()

    def given(self, batch: Batch) -> None:
        """Count the elements that the engine was given, and those that only padded others."""
        given = batch.rows * prod(batch.shape)
        self.elements_in += given
        if batch.pad_to:
            self.elements_padded += given - sum([t.rows * prod(t.shape) for t in batch.tickets])

    def account(self, batch: Batch, now: int, nbytes: int = 0) -> None:
        """Count a batch that was computed, and the time of each of its tickets that did not fail.

        Args:
            now: when it was sent.
            nbytes: of its output, 0 if that stays here. Of tickets that failed nothing is
                published.
        """
        rows = failed = 0
        for ticket in batch.tickets:
            if ticket.key in batch.errors:
                self.failures += 1
                failed += ticket.rows
                continue
            wait, overhead, _ = spent(ticket, batch, now)
            self.wait.record(wait)
            self.overhead.record(overhead)
            self.requests += 1
            rows += ticket.item.rows
        compute = batch.compute_to_ns - batch.compute_from_ns
        self.batches += 1
        self.given(batch)
        self.rows += rows
        self.compute.record(compute)
        self.served.add(rows, now)
        if failed:
            self.failed_rows += failed
            self.failed.add(failed, now)
        self.busy.add(compute, now)
        if nbytes:
            self.bytes_out += nbytes * rows // batch.rows
        self.copies_out += batch.copies

    @property
    def counts(self) -> tuple[int, int, int, int, int]:
        """Requests, rows, batches, failures, expired; if they stay, nothing has happened."""
        return self.requests, self.rows, self.batches, self.failures, self.expired

    def snapshot(self, now: int, queued: int, queued_rows: int, width: int) -> StageSnapshot:
        """A copy that another thread may turn into KPIs; cheap: it interrupts the data thread.

        Args:
            now: monotonic clock, ns.
            queued, queued_rows: what waits.
            width: forwards that may go on at once.
        """
        served, busy = self.served.rate(now), self.busy.rate(now)
        if busy > 0:
            mu = (served + self.failed.rate(now)) * 1e9 / busy
        else:
            rows = self.rows + self.failed_rows
            mu = rows * 1e9 / self.compute.total if self.compute.total else 0.0
        return StageSnapshot(
            queued,
            queued_rows,
            self.counts,
            (self.arrived.rate(now), width * mu, served),
            (self.wait.copy(), self.overhead.copy(), self.compute.copy()),
            (self.bytes_out, self.copies_out),
            (self.elements_in, self.elements_padded),
            self.failed_rows,
        )


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """One moment of a :class:`StageMeter`."""

    queued: int
    queued_rows: int
    counts: tuple[int, int, int, int, int]
    rates: tuple[float, float, float]
    times: tuple[Histogram, Histogram, Histogram]
    outs: tuple[int, int]
    elements: tuple[int, int]
    failed_rows: int = 0

    def kpi(self, spec: StageSpec) -> StageKpi:
        requests, rows, batches, failures, expired = self.counts
        lam, mu, served = self.rates
        wait, overhead, compute = self.times
        return StageKpi(
            stage=spec.stage,
            block=spec.block.name,
            queue=self.queued,
            queue_rows=self.queued_rows,
            requests=requests,
            rows=rows,
            batches=batches,
            failures=failures,
            expired=expired,
            lam=lam,
            mu=mu,
            rho=lam / mu if mu else 0.0,
            rows_per_s=served,
            mean_batch_rows=(rows + self.failed_rows) / batches if batches else 0.0,
            wait=wait.summary(),
            overhead=overhead.summary(),
            compute=compute.summary(),
            bytes_out=self.outs[0],
            copies_out=self.outs[1],
            elements_in=self.elements[0],
            elements_padded=self.elements[1],
            failed_rows=self.failed_rows,
            engine=spec.engine,
            precision=spec.precision,
        )


class Stage:
    """One block of this worker.

    Attributes:
        engine: that was made for it.
        engines: that one and its twins.
        free: of these, to be taken for a forward and put back; there is one for each batch that
            :attr:`width` allows.
        fill: the value that its inputs are padded with.
        output_dims: dims of the output for an input's dtype and dims, as
            :meth:`~blockflow.core.fits.Fits.output_dims`.
    """

    __slots__ = (
        "contract",
        "engine",
        "engines",
        "fill",
        "free",
        "meter",
        "name",
        "number",
        "output_dims",
        "spec",
        "timeout_ns",
    )

    def __init__(self, spec: StageSpec, engine: Engine) -> None:
        self.spec = spec
        self.engine = engine
        self.engines = [engine]
        self.free = [engine]
        self.number = spec.stage
        self.name = spec.block.name
        self.contract = spec.block.contract
        self.fill = 0 if spec.block.padding is None else spec.block.padding.value
        self.timeout_ns = spec.timeout_ms * 1_000_000
        self.meter = StageMeter()
        self.output_dims = Fits(self.contract, self.name).output_dims

    @property
    def width(self) -> int:
        """Batches that may be computed at once."""
        return len(self.engines)

    def widen(self, lanes: int) -> None:
        """Have a twin of the loaded engine for each further lane, where there can be one."""
        while len(self.engines) < lanes and (twin := self.engine.twin()) is not None:
            self.free.append(twin)
            self.engines.append(twin)

    def cuts(self, batch: Batch) -> dict[int, tuple[int, ...]]:
        """Dims after the rows that each ticket has of a padded batch's output, by its key; nothing
        where that is all of it.

        Raises:
            RequestError: as :attr:`output_dims`.
        """
        if not batch.pad_to:
            return {}
        dtype = batch.tickets[0].source.dtype
        whole = self.output_dims(dtype, (batch.rows, *batch.pad_to))[1:]
        own = {t.key: self.output_dims(dtype, (t.rows, *t.shape))[1:] for t in batch.tickets}
        return own if any(shape != whole for shape in own.values()) else {}
