"""Promises: the rows of the table, with their targets and the commands that measure them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from blockflow.bench import overload_figures as overload
from blockflow.bench.chaos import report as chaos
from blockflow.bench.chaos.growth import ONE_LIFE
from blockflow.bench.fuzz import figures as fuzz
from blockflow.bench.grid import Grid, digits
from blockflow.bench.reliability import figures as names
from blockflow.bench.reliability.promise import (
    NOT_MEASURED,
    Book,
    Finding,
    Promise,
    find,
    held,
    spread,
    within,
)
from blockflow.bench.results import Figure
from blockflow.bench.statistics import Interval, Verdict, judge

BENCH, CHAOS, KILLS, SOAK = "reliability", "chaos", "kills", "soak"
OVERLOAD, UPDATES, FUZZ, FAULTSIM = "overload", "updates", "fuzz", "faultsim"
"""Names of the result files."""

COMMANDS: Mapping[str, str] = {
    BENCH: "make bench-reliability",
    CHAOS: "make chaos",
    KILLS: "make chaos ARGS='--kills 1000'",
    SOAK: "make soak",
    OVERLOAD: "make bench-overload",
    UPDATES: "make bench-updates",
    FUZZ: "make fuzz",
    FAULTSIM: "make faultsim",
}
_FLAT, _FEW = 1.5, 8.0
"""The limit goes up and down to see what the queues do: medians within this factor are equal, and
so few as are always in the blocks' hands say nothing."""
_SERVED = 0.9
"""A worker may die with the Manager, and its requests wait for a turn elsewhere."""
_CUT = 0.9
"""Of the rounds beside a client that does not read: in fewer, it was none."""
_EQUAL = 1.05
"""Now and then a request is answered before it is cancelled."""
_SOAK_S = 0.75 * 3600
"""Of an hour, growth is judged over what comes after the warm-up."""
_LIFE = f"heap, dispatcher{ONE_LIFE}"
_LIFE_S = 1200.0
"""Of one life of the Dispatcher: in a shorter one a slow leak does not show."""


# --- rows that need words of their own ------------------------------------------------------------


def _ledger(book: Book) -> Finding:
    """Of a chaos run: one terminal reply each."""
    n = book.at(chaos.REQUESTS, "all").n
    broken = {
        what: book.value(chaos.REQUESTS, what)
        for what in ("never ended", "ended twice", "no reply from a living dispatcher")
    }
    hit = sum(f.value for f in book.figures if f.name == chaos.HITS)
    wrong = book.value(chaos.VIOLATIONS, "all")
    text = f"{hit:,.0f} processes killed or stopped, {n:,} requests: "
    text += ", ".join(f"{value:.0f} {what}" for what, value in broken.items())
    text += f"; {book.value(chaos.ANSWERED, 'all'):.2%} {chaos.ANSWERED}"
    return Finding(text, held(not any(broken.values()) and not wrong))


def _kills(book: Book) -> Finding:
    found = _ledger(book)
    roles = [f"{f.value:.0f} x {f.mode}" for f in book.figures if f.name == chaos.HITS]
    killed = sum(f.value for f in book.figures if f.name == chaos.HITS)
    verdict = held(found.verdict == Verdict.MET, killed >= 1000)
    return Finding(f"{found.text} ({', '.join(roles)})", verdict)


def _left_after_chaos(book: Book) -> Finding:
    processes, files = (book.value(chaos.LEFT, what) for what in ("processes", "files"))
    text = f"{processes:.0f} processes, {files:.0f} directories"
    return Finding(text, held(not processes and not files))


def _growth(book: Book) -> Finding:
    found = [f for f in book.figures if f.name == chaos.GROWTH]
    if not found:
        raise KeyError(chaos.GROWTH)
    growing = [f for f in found if f.labels["grows"]]
    worst = max(found, key=lambda f: f.value / f.labels["tolerance"])
    longest = max(f.labels["seconds"] for f in found)
    life = max((f.labels["seconds"] for f in found if f.mode == _LIFE), default=0)
    text = f"{len(growing)} of {len(found)} series grow in {longest} s, "
    text += f"one life of the dispatcher for {life} s of it; most: {worst.mode} "
    text += f"{worst.value:+.1f} {worst.unit} "
    text += f"({digits(worst.low or 0.0)} to {digits(worst.high or 0.0)})"
    enough = longest >= _SOAK_S and life >= _LIFE_S
    return Finding(text, held(not growing, enough))


def _poison(book: Book) -> Finding:
    blamed, mates = book.count(names.POISONED), book.count(names.MATES)
    killed = book.count(names.DIED_OF_IT)
    text = f"{killed.value:.0f} workers, blamed {blamed.value:.0f} of {blamed.n}, "
    text += f"batch mates answered {mates.value:.0f} of {mates.n}"
    whole = killed.value == 2 and blamed.value == blamed.n and mates.value == mates.n
    return Finding(text, held(whole))


def _hung_requests(book: Book) -> Finding:
    f = book.count(names.AGAIN)
    return Finding(f"{f.value:.0f} of {f.n} answered by the successor", held(f.value == f.n))


def _given_up(book: Book) -> Finding:
    """Not before the fifth crash, not after it; the others notice nothing."""
    crashes, others = book.count(names.CRASHES), book.count(names.BYSTANDERS)
    stays, refused = book.count(names.STAYS), book.count(names.REFUSED)
    text = f"failed after {crashes.value:.0f} of {crashes.n}; it stays so {stays.value:.0f} of "
    text += f"{stays.n} times, requests are refused at once {refused.value:.0f} of {refused.n}; "
    text += f"of others, {others.value:,.0f} of {others.n:,} are answered"
    whole = all(f.value == f.n for f in (crashes, stays, refused, others))
    return Finding(text, held(whole, others.n > 0))


def _load_failure(book: Book) -> Finding:
    f = book.count(names.LOADS)
    again = "" if f.labels["stays"] else "not "
    text = f"{f.value:.0f} start after the artifact was altered, {again}failed for good"
    return Finding(text, held(f.value == f.n and bool(f.labels["stays"])))


def _readiness(book: Book) -> Finding:
    f, probe = book.count(names.PROBED), book.at(names.PROBE, "all")
    return Finding(f"{f.value:.0f} of {f.n}; a probe takes {spread(probe)}", held(f.value == f.n))


def _deadlines(book: Book) -> Finding:
    """Every reply counts, a result as much as an error; what is over by no more than this machine
    was late to wake a thread just then, it may have done itself."""
    after, late = book.at(names.LATENESS, "all"), book.count(names.OVERDUE)
    missing = book.count(names.NO_REPLY)
    most = float(after.labels["max"])
    text = (
        f"at most {digits(most)} ms; {book.count(names.AFTERWARDS).value:.0f} of {late.n} replies "
    )
    text += f"came after it, {late.value:.0f} too late; without a reply "
    text += f"{missing.value:.0f} of {missing.n}"
    if missing.value or late.labels.get("beyond_lag", late.value):
        return Finding(text, Verdict.MISSED)
    return Finding(text, Verdict.NOISE if late.value else Verdict.MET)


def _cancelled(book: Book) -> Finding:
    f, reply = book.count(names.IN_VAIN), book.at(names.CANCELLED, "all")
    text = f"computed {f.value:.0f} of {f.n}; the reply after {spread(reply)}"
    return Finding(text, held(not f.value))


def _goodput(book: Book) -> Finding:
    rates = {f.mode: f.value for f in book.figures if f.name == overload.GOODPUT}
    peak, share = max(rates.values()), rates["3x"] / max(rates.values())
    f = book.at(overload.GOODPUT, "3x")
    # Half of a Poisson count's 95% interval: so much is chance.
    counted_s = (1 - overload.WARM_UP) * float(f.labels.get("seconds", 1.0))
    chance = 1.96 / max(1.0, f.value * counted_s) ** 0.5
    found = Interval(share, share * (1 - chance), share * (1 + chance), f.n)
    text = f"{100 * share:.0f}% ({digits(f.value)} of {digits(peak)} per second)"
    return Finding(text, judge(found, 0.9, at_least=True))


def _rejections(book: Book) -> Finding:
    f = book.at(overload.REJECTION, "3x")
    p99 = f.p99_ms if f.p99_ms is not None else f.value
    beyond = float(f.labels.get("beyond_lag", p99))
    more = f"; {digits(beyond)} ms beyond the machine's own lag" if p99 >= 10.0 else ""
    verdict = Verdict.MET if p99 < 10 else Verdict.NOISE if beyond < 10 else Verdict.MISSED
    return Finding(f"p99 {digits(p99)} ms, median {digits(f.value)}, n = {f.n}{more}", verdict)


def _flat(book: Book) -> Finding:
    mib = [f.value for f in book.figures if f.name == overload.MEMORY]
    if not mib:
        raise KeyError(overload.MEMORY)
    first, last = overload.quarters(mib)
    share = last / first - 1
    text = f"{first:.0f} MiB in the first quarter of the run, {last:.0f} in the last ({share:+.1%})"
    return Finding(text, held(share <= 0.05))


def _queues(book: Book) -> Finding:
    """Neither along the load nor with the load: as much waits at last as at first, and no more
    than where the capacity is just exceeded."""
    parts, flat = [], True
    for name in (overload.IN_FLIGHT, overload.QUEUED):
        f, edge = book.at(name, "3x"), book.at(name, "1.5x")
        first, before = float(f.labels["first half"]), edge.value
        flat &= f.value <= _FLAT * max(first, _FEW) and f.value <= _FLAT * max(before, _FEW)
        parts.append(
            f"{name} {first:.0f}, then {f.value:.0f}, at most {f.labels['max']:.0f} "
            f"({before:.0f} at 1.5 times)"
        )
    return Finding("; ".join(parts), held(flat))


def _shares(book: Book) -> Finding:
    f, index = book.count(names.SMALLEST_SHARE), book.count(names.JAIN)
    text = f"the smallest is {f.value:.0%} of a fair share, Jain's index {index.value:.3f}"
    return Finding(f"{text}, n = {f.n}", held(f.value >= 0.8))


def _cut_off(book: Book) -> Finding:
    parts, verdicts = [], []
    for how, goal_ms in ((names.BY_BYTES, 2000.0), (names.BY_TIME, 2500.0)):
        cut = book.count(f"{names.CUT_OFF} {how}")
        found = within(names.CUT_OFF, how, goal_ms, seconds=True)(book)
        parts.append(f"{how} {cut.value:.0f} of {cut.n}: {found.text}")
        verdicts.append(found.verdict if cut.value == cut.n else Verdict.MISSED)
    worst = next((v for v in (Verdict.MISSED, Verdict.NOISE) if v in verdicts), Verdict.MET)
    return Finding("; ".join(parts), worst)


def _others(book: Book) -> Finding:
    f = book.at(names.OTHERS, names.BESIDE)
    found = f.interval
    noise = float(f.labels["noise"])
    text = f"x {f.value:.2f} ({digits(found.low)}-{digits(found.high)}), n = {f.n} pairs; "
    text += f"beside itself up to {noise:.0%} apart"
    reader, other = float(f.labels["reader_mib"]), float(f.labels["other_mib"])
    text += f"; who reads got {reader:.2f} MiB a round, who does not {other:.2f}"
    verdict = judge(found, 1.1, noise)
    # A heavier neighbour to compare with, or one that was cut off as well, would hide harm.
    comparable = reader <= _EQUAL * other and not f.labels["reader_cut"]
    comparable &= float(f.labels["other_cut"]) >= _CUT
    if verdict == Verdict.MET and not comparable:
        return Finding(f"{text}: no fair comparison", Verdict.NOISE)
    return Finding(text, verdict)


def _left_after_all(book: Book) -> Finding:
    f = book.at(names.LEFT, names.AFTER_ALL)
    return Finding(f"{f.value:.0f}; {f.n} times", held(not f.value))


def _left_after_one(book: Book) -> Finding:
    """By a worker, Dispatcher, template or manager that is killed, and by workers that hang."""
    found = [book.at(names.LEFT, mode) for mode in (names.AFTER_DEATHS, *names.ROLES)]
    what = ("files", "segments", "processes", "descriptors")
    total = {name: sum(int(f.labels[name]) for f in found) for name in what}
    times = ", ".join(f"{f.n} x {f.mode}" for f in found[1:])
    text = ", ".join(f"{n} {name}" for name, n in total.items())
    text += f"; {found[0].n} deaths of workers that were killed, hung or poisoned, {times}"
    return Finding(text, held(not any(f.value for f in found)))


def _taken_over(book: Book) -> Finding:
    found = within(chaos.RECOVERY, chaos.MANAGER_BACK, 5000.0, seconds=True)(book)
    served, empty = (book.at(chaos.SERVED, what) for what in (chaos.AWAY, chaos.UNSERVED))
    nobody = book.at(chaos.SERVED, chaos.ABANDONED)
    share = served.value / served.n if served.n else 0.0
    text = f"{found.text}, {nobody.value:.0f} times not at all; meanwhile "
    text += f"{served.value:,.0f} of {served.n:,} requests were answered, "
    text += f"{empty.value:.0f} times none"
    if nobody.value or empty.value or share < _SERVED:
        return Finding(text, Verdict.MISSED)
    return Finding(text, found.verdict)


def _updates(book: Book) -> Finding:
    done, asked = book.value("updates", "t"), book.value("requests", "t")
    failed, mixed = book.value("failed requests", "t"), book.value("mixed requests", "t")
    text = f"{done:.0f} updates, {asked:,.0f} requests: {failed:.0f} failed, {mixed:.0f} mixed"
    return Finding(text, held(not failed and not mixed, done >= 100))


def _bad_input(book: Book) -> Finding:
    frames = book.value(fuzz.FRAMES, "all")
    failed = book.value(fuzz.FAILURES, "all")
    growth = [f for f in book.figures if f.name == fuzz.GROWTH]
    worst = max(growth, key=lambda f: f.value)
    text = f"{frames:,.0f} frames: {failed:.0f} failures, at most "
    text += f"{worst.value:+.1f} MiB ({worst.mode})"
    # Each target gets a whole number of frames: together they are a little less than a million.
    return Finding(text, held(not failed and worst.value <= 32, frames >= 0.99e6))


def _simulated(book: Book) -> Finding:
    hours, broken = book.value("virtual time", "all"), book.value("violations", "all")
    runs, faults = book.at("violations", "all").n, book.value("faults", "all")
    text = f"{hours:,.0f} virtual hours, {runs:,} seeds, {faults:,.0f} faults: {broken:.0f} broken"
    return Finding(text, held(not broken, hours >= 24_000))


def _nothing_late(book: Book) -> Finding:
    late = book.value("violations", "nothing starts late")
    requests = book.value("requests", "all")
    text = f"{late:.0f} of {requests:,.0f} simulated requests"
    return Finding(text, held(not late, book.value("virtual time", "all") >= 24_000))


PROMISES: Sequence[Promise] = (
    Promise(
        "a worker that is killed is noticed",
        "<= 100 ms (process descriptor)",
        BENCH,
        within(names.NOTICED, names.KILLED, 100.0),
    ),
    Promise(
        "... and replaced",
        "load + <= 1 s, back-off included",
        BENCH,
        within(names.BEYOND_LOAD, names.KILLED, 1000.0),
    ),
    Promise(
        "a stopped worker is noticed",
        "< 1 s",
        BENCH,
        within(names.NOTICED, names.STOPPED, 1000.0),
    ),
    Promise(
        "one that lives and says nothing is noticed by its heartbeat",
        "<= 1 s",
        BENCH,
        within(names.NOTICED, names.FROZEN, 1000.0),
    ),
    Promise(
        "a forward that does not end is ended, beyond the block's `timeout_ms` by",
        "<= 1 s ([why not 0](#deviations))",
        BENCH,
        within(names.NOTICED, names.STUCK, 1000.0),
    ),
    Promise("requests of workers that hang", "all answered", BENCH, _hung_requests),
    Promise(
        "a worker that crashes again and again",
        "failed after 5 in 60 s; others unaffected",
        BENCH,
        _given_up,
    ),
    Promise("a load failure", "not retried", BENCH, _load_failure),
    Promise("1,000 kills over all roles under load", "one terminal reply each", KILLS, _kills),
    Promise("all faults at once", "one terminal reply each", CHAOS, _ledger),
    Promise("an hour of that: memory, descriptors", "nothing grows", SOAK, _growth),
    Promise("poison is blamed alone", "kills 2 workers; batch mates answered", BENCH, _poison),
    Promise("a reply comes by its deadline", "+ <= 100 ms", BENCH, _deadlines),
    Promise("no block starts an expired request", "0", FAULTSIM, _nothing_late),
    Promise("cancelled requests that are computed", "0", BENCH, _cancelled),
    Promise("goodput at three times the capacity", ">= 90% of the peak", OVERLOAD, _goodput),
    Promise("rejections at three times the capacity", "p99 < 10 ms", OVERLOAD, _rejections),
    Promise("memory under overload", "flat (+ <= 5%)", OVERLOAD, _flat),
    Promise("queues under overload", "flat (x <= 1.5)", OVERLOAD, _queues),
    Promise(
        "clients that ask for 0.5, 0.5, 1 and 2 times the capacity",
        ">= 80% of a fair share each",
        BENCH,
        _shares,
    ),
    Promise(
        "a client that does not read is cut off",
        "at 8 MiB or 2 s ([+ 0.5 s](#deviations))",
        BENCH,
        _cut_off,
    ),
    Promise("... and the others' p99", "+ < 10%", BENCH, _others),
    Promise("left over after single deaths", "0 within 10 s", BENCH, _left_after_one),
    Promise(
        "left over at the next start after everything was killed",
        "0",
        BENCH,
        _left_after_all,
    ),
    Promise("left over after a chaos run", "0", CHAOS, _left_after_chaos),
    Promise("updates under load", "0 failed, 0 mixed of 100", UPDATES, _updates),
    Promise(
        "a new manager takes the workers over",
        "<= 5 s; serving goes on",
        KILLS,
        _taken_over,
    ),
    Promise("malformed frames", "10^6: 0 failures, RSS + <= 32 MiB", FUZZ, _bad_input),
    Promise("published workers that a probe had passed through", "all", BENCH, _readiness),
    Promise("invariants under virtual time", "24 h x 1,000 seeds: 0 broken", FAULTSIM, _simulated),
)


def promise_grid(stored: Mapping[str, Sequence[Figure]]) -> Grid:
    """All promises for which ``stored`` has results; those without come as not measured."""
    rows = []
    for promise in PROMISES:
        found = find(promise, stored)
        text, verdict = (NOT_MEASURED, "") if found is None else (found.text, str(found.verdict))
        if verdict == Verdict.MISSED:
            verdict = f"**{verdict}**"
        rows.append((promise.name, promise.target, text, verdict, f"`{COMMANDS[promise.results]}`"))
    heads = ("promise", "target", "measured", "verdict", "by")
    return Grid("promises", heads, rows, frozenset(heads))
