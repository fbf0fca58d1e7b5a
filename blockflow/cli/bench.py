"""``blockflow bench``: an MLPerf-style verdict on deployed tasks, by MLCommons' LoadGen.

``blockflow bench thesis`` is a command of its own (:mod:`blockflow.cli.thesis`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from blockflow.bench.canvas import new_page
from blockflow.bench.demo.server import Rest, Server
from blockflow.bench.grid import Grid
from blockflow.bench.interrupts import interruptible
from blockflow.bench.mlperf.counts import CONFIDENCE
from blockflow.bench.mlperf.document import make_document
from blockflow.bench.mlperf.plan import Plan
from blockflow.bench.mlperf.presets import PRESETS, numbers, parse_weights, per_task, presets
from blockflow.bench.mlperf.rates import CONFIRMATIONS, SERVER_RUNS
from blockflow.bench.mlperf.report import (
    HTML,
    MARKDOWN,
    SUMMARY,
    Text,
    sections,
    write_report,
    write_summary,
)
from blockflow.bench.mlperf.result import as_error, interrupted
from blockflow.bench.mlperf.run import check_loadgen
from blockflow.bench.mlperf.search import RUNS
from blockflow.bench.mlperf.session import Session, Show
from blockflow.bench.mlperf.settings import (
    DEADLINE_S,
    MOST_QUERIES,
    SAMPLES_PER_QUERY,
    Mode,
    Scenario,
)
from blockflow.bench.mlperf.tally import Counts
from blockflow.bench.mlperf.validation import TOLERANCE, Check
from blockflow.cli.complete import complete_task
from blockflow.cli.exits import ExitCode
from blockflow.cli.lazy import Entries, LazyGroup
from blockflow.cli.options import (
    UPDATE_S,
    Address,
    ClientKeys,
    Json,
    Url,
    close_json,
    print_json,
    was_given,
)
from blockflow.core import limits
from blockflow.core.errors import BlockFlowError, RequestError, TopologyError
from blockflow.monitor.rest import RestClient
from blockflow.repository.scratch import scratch

_TITLES = (
    "Verdicts of LoadGen",
    "Each task's target",
    "What stands against a verdict",
    "Accuracy",
    "Validation tests",
)
"""The report's tables that the terminal shows as well."""

_COLUMNS = 4

_ALL = "all"


class BenchCommands(LazyGroup):
    """What ``blockflow bench`` does beside LoadGen's runs."""

    entries: ClassVar[Entries] = {
        "thesis": ("thesis", "thesis", "Run the thesis's experiments on this machine.")
    }


app = typer.Typer(add_completion=False, cls=BenchCommands, invoke_without_command=True)


@app.callback()
def bench(
    context: typer.Context,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME, or NAME=WEIGHT,NAME=WEIGHT to mix tasks in one run. Required.",
            autocompletion=complete_task,
        ),
    ] = None,
    scenario: Annotated[
        list[Scenario] | None, typer.Option(help="Repeat it for several. Default: single-stream.")
    ] = None,
    mode: Annotated[
        list[Mode] | None, typer.Option(help="Repeat it for both. Default: performance.")
    ] = None,
    validate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="|".join((*Check, _ALL)), help="Validation test; repeat it for several."
        ),
    ] = None,
    short: Annotated[
        bool, typer.Option("--short", help="Seconds, for development; marked as such.")
    ] = False,
    preset: Annotated[
        str, typer.Option(help=f"NAME, or TASK=NAME,...: {', '.join(PRESETS)}.")
    ] = "",
    target_latency_ms: Annotated[str, typer.Option(help="MS, or TASK=MS,...")] = "",
    percentile: Annotated[
        str,
        typer.Option(
            help="Of the latency: P, or TASK=P,... Default: 90 single-stream, "
            "99 multistream and server, or the preset's."
        ),
    ] = "",
    confidence: Annotated[
        float, typer.Option(min=50.0, max=99.999, help="Percent; the query counts follow.")
    ] = 100 * CONFIDENCE,
    tolerance: Annotated[
        float, typer.Option(min=0.01, max=10.0, help="Validation: share by which pairs may differ.")
    ] = TOLERANCE,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, max=1e6, help="server: queries/s. Default: search the highest."),
    ] = None,
    precision: Annotated[
        float, typer.Option(min=0.005, max=1.0, help="server: share to which the rate is searched.")
    ] = 0.05,
    search_runs: Annotated[
        int, typer.Option(min=1, max=100, help="server: runs of the search at most.")
    ] = RUNS,
    confirmations: Annotated[
        int, typer.Option(min=1, max=100, help="server: rates confirmed after it, at most.")
    ] = CONFIRMATIONS,
    server_runs: Annotated[
        int,
        typer.Option(
            min=1, max=100, help="server: VALID runs of the result, the least counts. The paper: 5."
        ),
    ] = SERVER_RUNS,
    duration: Annotated[
        float | None, typer.Option(min=0.1, max=1e6, help="Least seconds of a run.")
    ] = None,
    queries: Annotated[
        int | None, typer.Option(min=1, max=MOST_QUERIES, help="Fewest queries (offline: samples).")
    ] = None,
    samples_per_query: Annotated[
        int, typer.Option(min=1, max=4096, help="multistream: samples of one query.")
    ] = SAMPLES_PER_QUERY,
    rows: Annotated[
        int, typer.Option(min=0, max=limits.MAX_ROWS, help="Of a request; 0: what the task takes.")
    ] = 0,
    in_flight: Annotated[int, typer.Option(min=1, max=4096, help="offline: open requests.")] = 16,
    data: Annotated[
        str, typer.Option(help="synthetic[:ROWS[:BELOW]], digits[:SEED], or .npy, .safetensors.")
    ] = "synthetic",
    preprocess: Annotated[
        str, typer.Option(help="MODULE:FUNCTION, row by row, or TASK=MODULE:FUNCTION,...")
    ] = "",
    deadline: Annotated[
        float,
        typer.Option(min=0.01, max=limits.MAX_DEADLINE_MS / 1e3, help="Seconds per request."),
    ] = DEADLINE_S,
    seed: Annotated[int, typer.Option(min=0, max=2**31, help="Of data and query order.")] = 1,
    topology: Annotated[
        Path | None, typer.Option(help="Start a system of its own with this update.")
    ] = None,
    repository: Annotated[
        Path, typer.Option("--repository", "-r", help="With --topology: the blocks.")
    ] = Path("blocks"),
    out: Annotated[Path, typer.Option(help="Folder of logs, summary and report.")] = Path(
        "results/bench"
    ),
    url: Url = "",
    address: Address = "",
    client_keys: ClientKeys = "",
    as_json: Json = False,
) -> None:
    """Measure deployed tasks with MLCommons' LoadGen and end in its verdict and a report."""
    if context.invoked_subcommand is not None:
        given = [name for name in context.params if was_given(context, name)]
        if given:
            context.fail(f"the options before {context.invoked_subcommand!r} are not its own")
        return
    if not task:
        context.fail("Missing option '--task'.")
    if short and was_given(context, "confidence"):
        context.fail("--confidence has no effect with --short, which has counts of its own")
    check_loadgen()
    new_page(1, 1)  # without matplotlib this says so now, not after the runs
    if preprocess:
        sys.path.insert(0, str(Path.cwd()))  # the user's own module lies in this folder
    weights = parse_weights(task)
    names = list(weights)
    checks = _checks(validate or [])
    bounds = per_task(target_latency_ms, names, "--target-latency-ms")
    shares = per_task(percentile, names, "--percentile")
    hooks = per_task(preprocess, names, "--preprocess")
    console = Console(stderr=as_json, highlight=False)
    session: Session | None = None
    with interruptible():
        try:
            with (
                _system(context, topology, repository, url, address) as (rest, where),
                shown(console) as show,
            ):
                plan = Plan(
                    weights=weights,
                    scenarios=list(dict.fromkeys(scenario or [Scenario.SINGLE_STREAM])),
                    modes=list(dict.fromkeys(mode or [Mode.PERFORMANCE])),
                    out=out,
                    address=where,
                    client_keys=client_keys,
                    short=short,
                    duration_s=duration,
                    queries=queries,
                    data=data,
                    preprocess=hooks,
                    presets=presets(per_task(preset, names, "--preset"), "--preset"),
                    latency_ms=numbers(bounds, "--target-latency-ms", 0.0, 1e6),
                    percentile=numbers(shares, "--percentile", 0.0, 100.0),
                    rate=rate,
                    precision=precision,
                    search_runs=search_runs,
                    confirmations=confirmations,
                    server_runs=server_runs,
                    samples_per_query=samples_per_query,
                    rows=rows,
                    in_flight=in_flight,
                    seed=seed,
                    deadline_s=deadline,
                    confidence=confidence / 100,
                    checks=checks,
                    tolerance=tolerance,
                )
                session = Session(plan, show, rest, lambda s: _keep(s, out))
                session.run()
        except KeyboardInterrupt:
            if session is None or not session.measured:
                console.print(
                    "Interrupted before anything was measured; what was started was stopped."
                )
                raise typer.Exit(ExitCode.INTERRUPTED) from None
            session.error = interrupted()
        except Exception as exc:  # also of a system that does not stop: hours were measured before
            if session is None or not session.measured:
                raise
            session.error = session.error or as_error(exc)
    document = make_document(session, _command())
    _finish(document, session.error, _written(document, session, out), out, console, as_json)


def _written(document: dict[str, Any], session: Session, out: Path) -> BlockFlowError | None:
    """Write the report; why it could not be, for what was measured is shown all the same."""
    try:
        write_report(document, session.results, out)
    except Exception as exc:
        return as_error(exc)
    return None


def _keep(session: Session, out: Path) -> None:
    """What is left of a call that is killed. Where it cannot be written the end will say so."""
    with suppress(BlockFlowError):
        write_summary(make_document(session, _command()), out)


def _checks(texts: Sequence[str]) -> list[Check]:
    """Validation tests by name, each once."""
    known = {**{str(c): [c] for c in Check}, _ALL: list(Check)}
    for text in texts:
        if text not in known:
            raise RequestError(
                "INVALID_REQUEST",
                f"no validation test {text!r}",
                where="--validate",
                hint=f"known: {', '.join(known)}",
            )
    return list(dict.fromkeys(c for text in texts for c in known[text]))


def _command() -> str:
    """What a person types to get the same."""
    return shlex.join(["blockflow", *sys.argv[1:]])


def _finish(
    document: dict[str, Any],
    error: BlockFlowError | None,
    unwritten: BlockFlowError | None,
    out: Path,
    console: Console,
    as_json: bool,
) -> None:
    """Show it, and end with a status that scripts can rely on.

    ``error`` is what ended the runs, ``unwritten`` what kept the report from being written.
    """
    cancelled = error is not None and error.code == "CANCELLED"
    failure = (None if cancelled else error) or unwritten
    if as_json and failure is None:
        print_json(document)
    for part in sections(document):
        if isinstance(part, Text):
            console.print(escape(part.text))
        elif isinstance(part, Grid) and part.title in _TITLES:
            # The percentiles are in the report: a terminal is narrow.
            shown = Table(*part.heads[:_COLUMNS], title=part.title, title_justify="left")
            for row in part.rows:
                shown.add_row(*map(escape, row[:_COLUMNS]))
            console.print(shown)
    if unwritten is None:
        told = f"Report: {out / MARKDOWN}, {out / HTML}\nEverything: {out / SUMMARY}"
        console.print(escape(told))
    if failure is not None:
        if as_json:
            close_json(document, failure)
        raise failure
    if cancelled:
        console.print("Interrupted. What was started was stopped; what was measured is kept.")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if not document["valid"]:
        raise typer.Exit(ExitCode.FAILED)


@contextmanager
def _system(
    context: typer.Context, topology: Path | None, repository: Path, url: str, address: str
) -> Iterator[tuple[Rest | None, str]]:
    """REST and the clients' address of the running system, or of one started for this call."""
    if topology is None:
        # Another address alone: the REST of the default address would be some other system's.
        yield (RestClient(url or None) if url or not address else None), address
        return
    # Where the environment says that another one runs does not matter to a system of its own.
    given = [f"--{name}" for name in ("url", "address") if was_given(context, name)]
    if given:
        raise RequestError(
            "INVALID_REQUEST", "--topology starts a system of its own", where=", ".join(given)
        )
    update = _read_update(topology)
    with scratch() as folder, Server(repository.resolve(), folder, RestClient) as server:
        server.start()
        try:
            server.rest.post("/v1/system-update", update, timeout_s=UPDATE_S)
        except (RequestError, TopologyError) as exc:
            exc.where = f"{topology}: {exc.where}" if exc.where else str(topology)
            raise
        yield server.rest, server.client_address


def _read_update(topology: Path) -> bytes:
    """The file, if it is JSON: nothing is started for one that is not."""
    try:
        update = topology.read_bytes()
        json.loads(update)
    except (OSError, ValueError, RecursionError) as exc:
        why = exc.strerror if isinstance(exc, OSError) else f"it is no JSON: {exc}"
        raise RequestError(
            "INVALID_REQUEST", f"cannot read it: {why}", where=str(topology)
        ) from exc
    return update


@contextmanager
def shown(console: Console) -> Iterator[Show]:
    """One line that tells how far it is; a line per step where the output is no terminal."""
    with console.status("starting") as status:

        def show(what: str, counts: Counts | None) -> None:
            if counts is None:
                status.update(what)
                if not console.is_terminal:
                    console.print(what)
                return
            failed = f", {counts.failures} failed" if counts.failures else ""
            status.update(f"{what}: {counts.answered} of {counts.issued} samples{failed}")

        yield show
