"""The Manager's smaller pure parts: publication, supervision, update phases, pings, figures."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path

import pytest
from control_rig import S, topology

from blockflow.control.events import Kill, Send
from blockflow.control.kpis import KpiBook, aggregate, plain, totals
from blockflow.control.pings import PingBook
from blockflow.control.publication import Publication
from blockflow.control.routes import check_size
from blockflow.control.supervision import (
    DISPATCHER_POLICY,
    WORKER_POLICY,
    GiveUp,
    RestartAt,
    RestartLedger,
    spread,
)
from blockflow.control.update import FINAL, MOVES, Kind, Phase, Update
from blockflow.core import limits
from blockflow.core.errors import TopologyError
from blockflow.core.routing import RouteTable
from blockflow.core.specs import BlockSpec, TaskSpec
from blockflow.launch.process import describe_exit
from blockflow.wire.control import Pong, Stats


class TestPublication:
    def begin(self, *workers: int) -> tuple[Publication, list[object]]:
        p = Publication(ack_ns=2 * S, flip_ns=10 * S)
        out = p.publish(RouteTable(1, 5), RouteTable(1, 5), workers, 99, 0)
        return p, list(out)

    def test_workers_then_dispatcher_then_drained(self) -> None:
        p, out = self.begin(1, 2)
        assert [s.incarnation for s in out if isinstance(s, Send)] == [1, 2]
        assert p.applied(1, 5, S) == []
        (flip,) = p.applied(2, 5, S)
        assert isinstance(flip, Send) and flip.incarnation == 99
        assert p.flipped < p.version
        p.applied(99, 5, S)
        assert p.flipped == p.version and p.deadline() is None
        p.drained_below(99, 5)
        assert p.drained == 5

    def test_without_workers_the_flip_is_immediate(self) -> None:
        _, out = self.begin()
        assert [s.incarnation for s in out if isinstance(s, Send)] == [99]

    def test_old_acknowledgements_do_not_count(self) -> None:
        p, _ = self.begin(1)
        assert p.applied(1, 4, S) == []
        assert p.applied(99, 5, S) == []
        assert p.flipped == 0

    def test_a_dead_worker_is_not_waited_for(self) -> None:
        p, _ = self.begin(1, 2)
        p.applied(1, 5, S)
        assert [s.incarnation for s in p.gone(2, S) if isinstance(s, Send)] == [99]

    def test_a_slow_worker_is_not_waited_for_longer(self) -> None:
        p, _ = self.begin(1, 2, 3)
        p.applied(1, 5, S)
        assert p.tick(S) == []
        assert [s.incarnation for s in p.tick(2 * S) if isinstance(s, Send)] == [99]
        assert p.late == 2
        assert p.applied(2, 5, 3 * S) == [] and p.gone(3, 3 * S) == []
        assert p.deadline() == 12 * S, "the Dispatcher is told once, whoever is heard of later"

    def test_a_hung_dispatcher_is_killed_once(self) -> None:
        p, _ = self.begin()
        assert p.deadline() == 10 * S and p.tick(10 * S - 1) == []
        assert p.tick(10 * S) == [Kill(99)]
        assert p.tick(20 * S) == []

    def test_a_dead_dispatcher_leaves_nothing_in_flight(self) -> None:
        p, _ = self.begin(1)
        p.gone(99, S)
        assert p.drained == 5 and p.deadline() is None
        assert p.applied(1, 5, S) == []
        out = p.publish(RouteTable(1, 6), RouteTable(1, 6), (1,), 100, S)
        assert len(out) == 1

    def test_a_drained_of_a_stranger_or_the_future_does_not_count(self) -> None:
        p, _ = self.begin()
        p.drained_below(7, 5)
        p.drained_below(99, 6)
        assert p.drained == 0
        p.drained_below(99, 5)
        p.drained_below(99, 4)
        assert p.drained == 5

    def test_what_drained_before_newer_routes_are_known_counts(self) -> None:
        p, _ = self.begin()
        p.publish(RouteTable(1, 6), RouteTable(1, 6), (1,), 99, S)
        p.drained_below(99, 6)
        assert p.drained == 0
        p.drained_below(99, 5)
        assert p.drained == 5

    def test_a_newer_publication_waits_for_none_of_the_older_ones_workers(self) -> None:
        p, _ = self.begin(1, 2)
        p.publish(RouteTable(1, 6), RouteTable(1, 6), (1,), 99, S)
        assert [s.incarnation for s in p.applied(1, 6, S) if isinstance(s, Send)] == [99]


class TestSupervision:
    def test_back_off_doubles_and_the_fifth_crash_ends_it(self) -> None:
        ledger = RestartLedger(WORKER_POLICY)
        delays = []
        for _ in range(4):
            verdict = ledger.crashed(0)
            assert isinstance(verdict, RestartAt)
            delays.append(verdict.at_ns / S)
        assert delays == [0.1, 0.2, 0.4, 0.8]
        assert isinstance(ledger.crashed(0), GiveUp)
        assert ledger.total == 5

    def test_old_crashes_are_forgotten(self) -> None:
        ledger = RestartLedger(WORKER_POLICY)
        for i in range(50):
            verdict = ledger.crashed(i * 61 * S)
            assert verdict == RestartAt(i * 61 * S + S // 10)

    def test_the_dispatcher_is_never_given_up_and_the_delay_is_capped(self) -> None:
        ledger = RestartLedger(DISPATCHER_POLICY)
        for _ in range(100):
            verdict = ledger.crashed(0)
        assert verdict == RestartAt(30 * S)

    def test_who_finds_no_room_is_never_given_up_and_soon_tried_again(self) -> None:
        ledger = RestartLedger(WORKER_POLICY)
        delays = [ledger.no_room(0).at_ns / S for _ in range(9)]
        assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 3])
        assert ledger.no_room(61 * S) == RestartAt(61 * S + S // 10), "old ones are forgotten"
        assert ledger.crashed(61 * S) == RestartAt(61 * S + S // 10), "and are no crashes"

    def test_chance_shortens_a_pause_by_half_at_most(self) -> None:
        for chance in (0.0, 0.3, 1.0):
            ledger = RestartLedger(WORKER_POLICY)
            delays = []
            for _ in range(4):
                verdict = ledger.crashed(0, chance=chance)
                assert isinstance(verdict, RestartAt)
                delays.append(verdict.at_ns / S)
            assert delays == pytest.approx([d * (1 - chance / 2) for d in (0.1, 0.2, 0.4, 0.8)])

    def test_neighbours_come_back_at_different_times(self) -> None:
        for first in (1, 100, 12345):
            chances = sorted(spread(first + i) for i in range(8))
            assert all(0 <= c < 1 for c in chances)
            assert min(b - a for a, b in itertools.pairwise(chances)) > 0.05

    def test_what_cannot_work_is_not_tried_again(self) -> None:
        assert isinstance(RestartLedger(WORKER_POLICY).crashed(0, retryable=False), GiveUp)


class TestUpdate:
    def test_phases_follow_the_table(self) -> None:
        for start, allowed in MOVES.items():
            for end in Phase:
                update = Update(1, Kind.SYSTEM, 1, 0, phase=start)
                if end in allowed:
                    update.move(end, 5)
                    assert update.final == (end in FINAL)
                    assert (update.finished_ns == 5) == update.final
                else:
                    with pytest.raises(RuntimeError):
                        update.move(end, 5)

    def test_the_diagram_on_the_page_is_the_table(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "control-plane.md").read_text(encoding="utf-8")
        drawn = set(re.findall(r"^    (\w+) --> (\w+):", page, re.MULTILINE))
        assert drawn == {(str(a), str(b)) for a, ends in MOVES.items() for b in ends}

    def test_every_phase_leads_to_an_end(self) -> None:
        for phase in Phase:
            seen, todo = set(), [phase]
            while todo:
                at = todo.pop()
                seen.add(at)
                todo += [p for p in MOVES[at] if p not in seen]
            assert seen & FINAL


class TestPings:
    def test_answers_and_time_outs(self) -> None:
        book = PingBook()
        ping, sends = book.begin({1: "a#0", 2: "b#0"}, 0, S)
        assert [s.incarnation for s in sends] == [1, 2]
        assert book.pong(1, Pong(1, ping.seq, "ready"), 2_000_000) is None
        assert book.pong(1, Pong(1, ping.seq, "ready"), 3_000_000) is None
        assert book.pong(2, Pong(2, 999, "ready"), 1) is None
        assert book.tick(S - 1) == []
        (ended,) = book.tick(S)
        a, b = ended.to_dict()
        assert a == {"worker": "a#0", "incarnation": 1, "ok": True, "rtt_ms": 2.0, "state": "ready"}
        assert b == {"worker": "b#0", "incarnation": 2, "ok": False}
        assert book.deadline() is None

    def test_a_death_ends_the_wait(self) -> None:
        book = PingBook()
        ping, _ = book.begin({1: "a#0"}, 0, S)
        assert book.gone(1) == [ping]
        assert book.gone(1) == []

    def test_rounds_under_way_are_told_apart(self) -> None:
        book = PingBook()
        (first, _), (second, _) = (
            book.begin({1: "a#0", 2: "b#0"}, 0, S),
            book.begin({1: "a#0"}, 1, S),
        )
        nobody, sends = book.begin({}, 2, S)
        assert len({first.seq, second.seq, nobody.seq}) == 3 and not sends
        assert book.deadline() == S
        assert book.pong(1, Pong(1, second.seq, "ready"), 3) is second
        assert book.gone(1) == []  # of the first round another one is left
        assert book.tick(S) == [first] and book.deadline() is None


class TestFigures:
    def stage(self, **kw: object) -> dict[str, object]:
        summary = {"count": 4, "sum_ms": 8.0, "mean_ms": 2.0, "p50_ms": 2.0, "p90_ms": 3.0}
        base: dict[str, object] = {"stage": 1, "lam": 10.0, "mu": 40.0, "rows": 8, "batches": 4}
        return base | {"wait": summary | {"p99_ms": 4.0, "max_ms": 4.0}} | kw

    def test_one_replica_is_shown_as_it_is(self) -> None:
        out = aggregate([self.stage()])
        assert out["rho"] == 0.25
        assert out["mean_batch_rows"] == 2.0
        assert out["wait"]["p50_ms"] == 2.0 and out["wait"]["max_ms"] == 4.0

    def test_replicas_add_up(self) -> None:
        slow = {"count": 12, "sum_ms": 120.0, "p50_ms": 10.0, "p99_ms": 20.0, "max_ms": 20.0}
        out = aggregate([self.stage(), self.stage(wait=slow)])
        assert out["lam"] == 20.0 and out["rho"] == 0.25
        assert out["wait"]["count"] == 16
        assert out["wait"]["mean_ms"] == 8.0
        assert out["wait"]["p50_ms"] == 8.0
        assert out["wait"]["max_ms"] == 20.0

    def test_time_on_a_device_is_of_those_that_have_one(self) -> None:
        assert aggregate([self.stage(device={})])["device"] == {}
        some = {"count": 4, "sum_ms": 8.0, "p50_ms": 2.0, "max_ms": 4.0}
        more = {"count": 12, "sum_ms": 120.0, "p50_ms": 10.0, "max_ms": 20.0}
        out = aggregate([self.stage(device=d) for d in (some, {}, more)])["device"]
        assert (out["count"], out["mean_ms"], out["p50_ms"], out["max_ms"]) == (16, 8.0, 8.0, 20.0)

    def test_nothing_and_nonsense(self) -> None:
        assert aggregate([]) == {}
        out = aggregate([{"lam": "x", "mu": math.nan, "rows": True, "wait": {"count": None}}])
        assert out["lam"] == out["rows"] == 0 and out["rho"] == 0.0
        assert out["wait"]["p50_ms"] == 0.0

    def test_samples_become_plain_json(self) -> None:
        book = KpiBook()
        stats = Stats(
            1,
            5,
            [{"stage": 3}, {"stage": 1, "lam": math.inf}, "odd"],  # type: ignore[list-item]
            {"rss": 10, "cpu_percent": math.nan, "x": b"bytes"},
            {
                "deep": {"a": {"b": {"c": {"d": {"e": {}}}}}},
                "tasks": {1: math.inf, b"k": 2},
                "lists": [[[[[[[1]]]]]]],
            },
        )
        book.add(1, "a#0", stats, 100.0)
        (line,) = book.lines()
        told = json.loads(line)
        assert told["worker"] == "a#0" and told["time"] == 100.0 and told["time_ns"] == 5
        assert told["stages"] == [{"stage": 3}, {"stage": 1, "lam": None}]
        assert told["process"] == {"rss": 10, "cpu_percent": None, "x": None}
        deep, lists = {"a": {"b": {"c": {"d": {"e": None}}}}}, [[[[[None]]]]]
        assert told["extra"] == {"deep": deep, "tasks": {"1": None, "b'k'": 2}, "lists": lists}
        sample = book.latest(1)
        assert sample is not None
        assert totals([sample.process])["rss"] == 10
        assert book.stage(1, 1) == {"stage": 1, "lam": None}
        book.forget(1)
        assert book.latest(1) is None and len(book.lines()) == 1

    def test_plain_keeps_what_json_has(self) -> None:
        value = {"a": [1, 2.5, "x", None, True, {"b": []}]}
        assert plain(value) == value


class TestSmallThings:
    def test_the_page_names_every_field_of_a_topology(self) -> None:
        page = (Path(__file__).parents[2] / "docs" / "control-plane.md").read_text(encoding="utf-8")
        for model in (BlockSpec, TaskSpec):
            for field in model.model_fields:
                assert f"`{field}`" in page, field

    def test_exit_descriptions(self) -> None:
        assert describe_exit(0) == "exit status 0"
        assert describe_exit(-9) == "killed by SIGKILL"
        assert describe_exit(-199) == "killed by signal 199"

    def test_a_route_table_that_no_message_holds_is_refused(self) -> None:
        blocks = [f"b{i:02}" + "x" * 60 for i in range(64)]
        tasks = {f"t{i}": blocks for i in range(300)}
        with pytest.raises(TopologyError) as e:
            check_size(topology(blocks, tasks))
        assert e.value.code == "INVALID_TOPOLOGY"
        check_size(topology(blocks[:10], {"t": blocks[:10]}))

    def test_tasks_and_the_replicas_that_are_replaced_stand_in_no_table_together(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        many = topology(["b"], {f"t{i}": ["b"] for i in range(9)})
        monkeypatch.setattr(limits, "MAX_CONTROL_BYTES", 2_300)  # with both of them it takes 2601
        check_size(many)
        monkeypatch.setattr(limits, "MAX_CONTROL_BYTES", 2_200)
        with pytest.raises(TopologyError, match="one route table"):
            check_size(many)

    def test_tasks_of_which_clients_could_not_be_told_are_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The one contract that they have in common stands in routes once."""
        few = topology(["b"], {f"t{i}": ["b"] for i in range(40)})
        check_size(few)
        monkeypatch.setattr(limits, "MAX_DESCRIPTION_BYTES", 6_000)
        with pytest.raises(TopologyError, match="one description") as e:
            check_size(few)
        assert "over the limit of 6000" in e.value.problems[0].message
        check_size(topology(["b"], {"t": ["b"]}))
