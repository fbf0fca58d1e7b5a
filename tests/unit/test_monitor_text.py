"""Numbers at the edges of their units, and the lines and grids that no recorded document fills."""

from __future__ import annotations

import io
import os
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from blockflow.core.errors import make_error
from blockflow.monitor import text, top
from blockflow.monitor.grids import (
    Column,
    Grid,
    contract_grid,
    history_grid,
    load_grid,
    process_grid,
)
from blockflow.monitor.screen import render, show, top_screen
from blockflow.monitor.top import Top
from blockflow.monitor.view import (
    endpoints,
    headline,
    is_ready,
    legs,
    notices,
    ping_lines,
    processes,
    recent_batch,
    recent_mean,
    slices,
    timing_lines,
    update_lines,
    without_the_gone,
)


@pytest.mark.parametrize(
    ("shown", "want"),
    [
        (text.ms(9.99), "9.99"),
        (text.ms(10), "10.0"),
        (text.ms(99.9), "99.9"),
        (text.ms(100), "100"),
        (text.ms(9_999), "9999"),
        (text.ms(10_000), "10.0s"),
        (text.rate(0), "0.0"),
        (text.rate(99.9), "99.9"),
        (text.rate(100), "100"),
        (text.ratio(0.5), "0.50"),
        (text.percent(41.4), "41%"),
        (text.size(1023), "1023B"),
        (text.size(1024), "1.0K"),
        (text.size(100 * 1024), "100K"),
        (text.size(1023.7 * 1024), "1.0M"),
        (text.amount(9_999), "9,999"),
        (text.amount(10_000), "10.0k"),
        (text.amount(999_900), "999.9k"),
        (text.amount(999_960), "1.0M"),
        (text.amount(1_000_000), "1.0M"),
        (text.age(119), "119 s"),
        (text.age(120), "2 min"),
        (text.age(7_199), "120 min"),
        (text.age(7_200), "2 h"),
        (text.age(172_799), "48 h"),
        (text.age(172_800), "2 d"),
    ],
)
def test_numbers_at_their_edges(shown: str, want: str) -> None:
    assert shown == want


def test_epochs() -> None:
    epochs = [
        {"epoch": 3, "when": "", "how": "rollback", "in_force": True, "missing": ["a"]},
        {
            "epoch": 2,
            "when": "2026-01-02",
            "how": "system-update",
            "posted": {"tasks": {"t": ["a"], "u": ["b"]}},
            "missing": ["a", "b"],
        },
        {"epoch": 1, "when": "2026-01-01", "how": "system-update", "missing": []},
        {"epoch": 0, "how": "system-update", "missing": None},
    ]
    assert history_grid(epochs).rows == (
        ("3", "-", "rollback", "", "in force"),
        ("2", "2026-01-02", "system-update", "t, u", "gone: a, b"),
        ("1", "2026-01-01", "system-update", "", ""),
        ("0", "-", "system-update", "", "the repository is away"),
    )


def test_the_time_of_an_epoch_is_shown_whole() -> None:
    tasks = {f"task{n}": ["a"] for n in range(20)}
    when = "2026-11-30T15:02:27+00:00"
    what = {"epoch": 1, "how": "system-update", "in_force": True, "posted": {"tasks": tasks}}
    epoch = {"when": when, **what}
    assert when in render(history_grid([epoch]), 80).plain


@pytest.mark.parametrize(
    ("deadline", "shown"),
    [(500, "500 ms"), (9_999, "9999 ms"), (10_000, "10.0s"), (None, "-")],
)
def test_what_a_task_takes_and_gives(deadline: Any, shown: str) -> None:
    task = {"name": "t", "path": ["a", "b"], "missing": ["b"], "input": "i", "output": "o"}
    (row,) = contract_grid([{**task, "max_rows": 4, "deadline_ms": deadline}]).rows
    assert row == ("t", "a > b (down: b)", "i", "o", "4", shown)


def test_legs_without_granted_memory() -> None:
    some = {"slot": 0, "slot_bytes": 0, "message": 7, "message_bytes": 600}
    assert legs({"dispatcher": {"kpi": {"legs": {"out": some}}}}) == [
        "results  0 by slot (0B), 7 in messages (600B)"
    ]


def test_where_clients_are_served_is_the_dispatchers_word_if_need_be() -> None:
    assert endpoints({"dispatcher": {"clients": ["tcp://h:1"]}}) == ["clients  tcp://h:1"]
    both = {"clients": ["tcp://h:2"], "dispatcher": {"clients": ["tcp://h:1"]}}
    assert endpoints(both) == ["clients  tcp://h:2"]


def test_the_control_plane_and_its_template_are_processes_too() -> None:
    control = {"process": {"pss": 1}, "template": {"pid": 8, "pss": 2}}
    status = {"state": "ready", "pid": 7, "uptime_s": 9.0, "control": control}
    own, template = processes({**status, "workers": []})
    assert own == {
        "name": "control",
        "state": "ready",
        "pid": 7,
        "process": {"pss": 1},
        "uptime_s": 9.0,
    }
    assert (template["name"], template["state"], template["pid"]) == ("template", "warm", 8)
    assert template["process"]["pss"] == 2
    manager = {"pid": 9, "uptime_s": 1.0}
    apart = {**status, "manager": manager, "control": {"process": {"pid": 9, "pss": 1}}}
    guardian, own = processes(apart)  # figures stand beside the pid whose they are
    assert (guardian["name"], guardian["pid"], guardian.get("process")) == ("guardian", 7, None)
    assert (own["name"], own["pid"], own["process"]["pss"], own["uptime_s"]) == ("control", 9, 1, 1)
    assert "up 9 s" in headline(apart)
    control["template"] = {"pid": None, "uss": 0, "pss": 0}
    assert [p["name"] for p in processes(status)] == ["control"]


def test_a_failed_update_is_forgotten_for_the_next_one() -> None:
    failed = {"id": 2, "kind": "apply", "error": {"code": "C", "message": "m"}}
    assert notices({"last_update": failed}) == ["update 2 (apply) failed: C: m"]
    now = {"id": 3, "kind": "drain", "state": "preparing"}
    assert notices({"last_update": failed, "updating": now}) == ["update 3 (drain): preparing"]


@pytest.mark.parametrize(
    ("told", "ready"), [({"ready": True}, True), ({"ready": False}, False), ({}, False)]
)
def test_only_who_says_so_is_ready(told: dict[str, bool], ready: bool) -> None:
    assert is_ready(told) is ready


def test_who_has_gone_takes_the_figures_of_each_block_along() -> None:
    stages = [{"block": b, "kpi": {"rows": n}} for b, n in (("a", 3), ("b", 40))]
    blocks = [{"name": "a", "kpi": {"rows": 10}}, {"name": "b", "kpi": {"rows": 100}}]
    before = {"blocks": blocks, "workers": [{"pid": 1, "name": "w#0", "stages": stages}]}
    now = {"workers": [{"pid": 2, "name": "w#0"}]}
    assert [without_the_gone(b, before, now) for b in "ab"] == [{"rows": 7}, {"rows": 60}]
    assert without_the_gone("a", before, before) == {"rows": 10}


def test_what_has_not_happened_has_no_mean() -> None:
    assert recent_mean({"wait": {"count": 0, "mean_ms": 0.0}}, None, "wait") is None
    assert recent_batch({"batches": 0, "mean_batch_rows": 0.0}, None) is None
    assert recent_batch({"batches": 2, "mean_batch_rows": 1.5}, None) == 1.5


def test_rows_that_failed_were_in_a_batch() -> None:
    before = {"batches": 2, "rows": 4, "failed_rows": 4}
    now = {"batches": 4, "rows": 5, "failed_rows": 9}
    assert recent_batch(now, before) == 3


def test_where_the_time_of_an_answer_went() -> None:
    one = SimpleNamespace(
        block="trunk-with-a-name", transit_ms=1.0, wait_ms=2.0, overhead_ms=3.0, compute_ms=4.0
    )
    result = SimpleNamespace(
        timings=[one],
        total_ms=20.0,
        ingress_ms=5.0,
        egress_ms=6.0,
        rtt_ms=30.0,
        upload=SimpleNamespace(nbytes=2048, way="slot", ms=0.5),
        download=SimpleNamespace(nbytes=10, way="message", ms=None),
    )
    head, line, *rest = timing_lines(result)
    assert line.split() == ["trunk-with-a-name", "1.000", "2.000", "3.000", "4.000"]
    assert head.split() == ["block", "transit", "wait", "overhead", "compute", "ms"]
    assert head.index("transit") + len("transit") == line.index("1.000") + len("1.000")
    assert rest == [
        "at the Dispatcher 20.000 ms (in 5.000, out 6.000), round trip 30.000 ms",
        "to the Dispatcher 2.0K by slot in 0.500 ms; back 10B by message",
    ]


def test_an_update_that_failed_at_once_took_no_time() -> None:
    update = {"id": 4, "state": "preparing", "duration_ms": 0.0}
    assert update_lines({"epoch": 1, "update": update}) == ["update 4: preparing", "epoch 1"]


def test_what_took_seconds_has_one_unit() -> None:
    update = {"id": 4, "state": "done", "duration_ms": 11_800.0}
    assert update_lines({"epoch": 1, "update": update})[0] == "update 4: done in 11.8s"
    pings = {"pings": [{"worker": "a#0", "ok": True, "rtt_ms": 10_000, "state": "ready"}]}
    assert ping_lines(pings) == ["a#0  10.0s  ready"]


def test_what_is_shown_if_there_is_room_goes_from_the_right() -> None:
    columns = (Column("a"), Column("b", wide=True), Column("c"), Column("d", wide=True))
    grid = Grid("t", columns, (("1", "2", "3", "4"),))
    assert [c.name for c in grid.fitted(9).columns] == ["a", "b", "c"]


def test_a_percentile_of_nothing_is_none() -> None:
    times = {"count": 0, "p99_ms": 0.0}
    (row,) = load_grid({"blocks": [{"kpi": {"wait": times, "compute": times}}]}).rows
    assert row[-3:] == ("-", "-", "-")


def test_slots_that_are_all_free_are_slots() -> None:
    process = {
        "slots": 16,
        "slots_used": 0,
        "arena_bytes": 2048,
        "arena_used": 0,
        "arena_committed": 512,
    }
    process |= {"gpu_util_percent": 41, "gpu_power_w": 230}
    grid = process_grid({"workers": [{"name": "w#0", "process": process}]})
    (row,) = (dict(zip([c.name for c in grid.columns], r, strict=True)) for r in grid.rows)
    assert (row["slots"], row["arena"]) == ("0/16", "0B/512B/2.0K")
    assert (row["gpu"], row["gpu mem"], row["watt"]) == ("41%", "-", "230")


def test_policies_of_one_worker_that_differ_are_told_apart() -> None:
    two = {"policy": "dvabatch", "stages": [2]}
    both = {"policy": "dvabatch", "stages": [1, 1]}
    stages = [
        {"block": b, "batching": p} for b, p in zip("abcd", (two, two, both, both), strict=True)
    ]
    workers = [{"name": "w#0", "stages": stages}]
    assert slices({"workers": workers}) == ["stages   w#0: a+b", "stages   w#0: c, d"]


# --- top


def shown(status: dict[str, Any], note: str = "") -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    show(top_screen(status, None, 100, note), console)
    return out.getvalue().splitlines()


def test_the_line_of_the_whole() -> None:
    status = {
        "cores": [0, 1, 2, 3, 4, 5, 6, 7],
        "cores_at_once": 4,
        "monitor_hz": 4.0,
        "totals": {"cpu_percent": 41.0, "pss": 1 << 30},
        "dispatcher": {"kpi": {"inflight": 0}},
    }
    assert shown(status)[1] == "in flight 0   cpu 41% of 400%   pss 1.0G   monitor 4.0 Hz"
    assert shown({})[1].startswith("in flight -   cpu - of 0%")
    assert "refused" not in "\n".join(shown(status))
    assert shown(status, "refused")[2] == "refused"


def test_lines_that_wrap_take_room_from_the_rows() -> None:
    tasks = [{"name": f"t{n}", "path": ["a"]} for n in range(50)]
    for reasons in (["x"], ["x" * 250]):  # and of blocks and processes there are none
        out = io.StringIO()
        status = {"tasks": tasks, "reasons": reasons}
        show(top_screen(status, None, 100, height=30), Console(file=out, width=100))
        assert len(out.getvalue().splitlines()) == 30


class Watched(Top):
    """``top`` on a terminal: documents or errors, and keys, in turn; what each screen showed."""

    def __init__(self, steps: list[Any], keys: list[str]) -> None:
        self.out = io.StringIO()
        console = Console(file=self.out, width=100, height=60, force_terminal=True, highlight=False)
        self.screens: list[str] = []
        self.steps, self.keys = steps, keys
        super().__init__(self.next, 0.1, console, self.key)

    def next(self) -> Any:
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def key(self, seconds: float) -> str:
        assert seconds == 0.1
        self.screens.append(self.out.getvalue())
        self.out.truncate(0)
        self.out.seek(0)
        return self.keys.pop(0)


def document(count: int, total: float) -> dict[str, Any]:
    times = {"count": count, "sum_ms": total, "mean_ms": total / count}
    return {"blocks": [{"name": "a", "state": "ready", "kpi": {"compute": times}}]}


def test_top_compares_with_what_it_showed_before() -> None:
    error = make_error("NOT_RUNNING", "refused")
    steps = [document(10, 10.0), document(20, 80.0), error, document(30, 170.0)]
    watched = Watched(steps, ["", "", "", "q"])
    watched.run()
    first, second, third, fourth = watched.screens
    assert "1.00" in first and "7.00" in second and "9.00" in fourth
    assert "refused" in third and "7.00" in third
    assert "refused" not in fourth


def test_a_terminal_that_gets_narrower_is_shown_less() -> None:
    class Narrowed(Watched):
        def key(self, seconds: float) -> str:
            self._console.width = 50
            return super().key(seconds)

    watched = Narrowed([document(1, 1.0)] * 2, ["", "q"])
    watched.run()
    first, second = watched.screens
    heads = [Text.from_ansi(screen).plain.partition("\nblock")[2] for screen in (first, second)]
    assert "comp ms" in heads[0].partition("\n")[0]
    assert heads[1].partition("\n")[0].rstrip().endswith("ovh ms")  # columns go as a whole


@pytest.mark.parametrize("last", ["q", "Q", "qq", "\x1b"])
def test_keys_that_end_it(last: str) -> None:
    steps = [document(1, 1.0)] * 3
    watched = Watched(steps, ["\x1b[A", "x", last])  # an arrow begins with Escape
    watched.run()
    assert (watched.keys, steps) == ([], [])


def test_keys_come_as_they_are_sent_and_their_end_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    with open(read) as keys:
        monkeypatch.setattr("sys.stdin", keys)
        assert top._wait_stdin(0) == ""
        os.write(write, b"\x1b[A")
        assert top._wait_stdin(10) == "\x1b[A"
        os.close(write)
        assert top._wait_stdin(10) == "q"
