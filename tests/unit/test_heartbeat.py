"""Who hangs, and who only looks like it: the evidence under virtual time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from blockflow.control.heartbeat import Hang, Heartbeat
from blockflow.control.settings import Timing
from blockflow.launch.vitals import Vitals, read_vitals

MS = 1_000_000
S = 1_000_000_000
TIMING = Timing()
PERIOD = int(TIMING.beat * S)
ASK = int(TIMING.health * S)
SILENCE = int(TIMING.silence * S)
PATIENCE = int(TIMING.hang * S)
WORKER = 7


@dataclass
class Process:
    """What a process does, as seen from outside, each given as a function of the time.

    Attributes:
        state: of its main thread.
        eager: some thread wants a core.
        answers: its control thread answers pings.
        listens: its main loop sees them.
        share: of a core that it uses, all threads together.
        main_share: that of its main thread.
    """

    state: Callable[[int], str] = lambda now: "S"
    eager: Callable[[int], bool] = lambda now: False
    answers: Callable[[int], bool] = lambda now: True
    listens: Callable[[int], bool] = lambda now: True
    share: float = 0.0
    main_share: float = 0.001

    def vitals(self, now: int) -> Vitals:
        state = self.state(now)
        eager = self.eager(now) or state in "RD"
        return Vitals(state, int(now * self.share), int(now * self.main_share), eager)


class World:
    """A Manager that asks and looks as it should, unless ``asleep`` says that it cannot."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
        self.asleep: Callable[[int], bool] = lambda now: False
        self.controller_asleep: Callable[[int], bool] = lambda now: False
        self.hangs: list[tuple[int, Hang]] = []
        self._now = 1000 * S
        self._start = self._now
        self._ask_at = self._now
        self._seq = 0
        self._mail: list[int] = []
        self._outbox: list[int] = []
        self._back: list[tuple[int, int]] = []
        self._heard = 0
        self._deaf_to: list[int] = []

    @property
    def since(self) -> int:
        return self._now - self._start

    def run(self, seconds: float) -> list[Hang]:
        """Let time pass, 10 ms at a step."""
        end = self._now + int(seconds * S)
        while self._now < end:
            self._now += 10 * MS
            self._step()
        return [h for _, h in self.hangs]

    def _step(self) -> None:
        now, beat, process = self._now, self.beat, self.process
        since = self.since
        if not self.controller_asleep(since):
            for seq in self._outbox:
                self._mail.append(seq)
                beat.echoed(seq, now)
            self._outbox.clear()
        if not (self.asleep(since) or self.controller_asleep(since)):
            for seq, heard in self._back:
                beat.pong(WORKER, seq, heard, now)
            self._back.clear()
        if process.answers(since):
            self._deaf_to += self._mail
            self._back += [(seq, self._heard) for seq in self._mail]
            self._mail.clear()
        if process.listens(since) and self._deaf_to:
            self._heard = self._deaf_to[-1]
            self._deaf_to.clear()
        if self.asleep(since):
            return
        if now >= self._ask_at:
            self._ask_at = now + ASK
            self._seq += 1
            beat.asked(self._seq, [WORKER])
            self._outbox.append(self._seq)
        due = beat.deadline()
        if due is None or now >= due:
            seen = {WORKER: process.vitals(now)}
            self.hangs += [(since, h) for h in beat.look(seen, now)]


def never(since: int) -> bool:
    return False


def after(seconds: float) -> Callable[[int], bool]:
    return lambda since: since >= seconds * S


def until(seconds: float) -> Callable[[int], bool]:
    return lambda since: since < seconds * S


def between(start: float, stop: float) -> Callable[[int], bool]:
    return lambda since: start * S <= since < stop * S


def test_a_healthy_process_is_left_alone() -> None:
    assert World(Process()).run(60) == []
    assert World(Process(share=1.5, eager=lambda now: True)).run(60) == []


def test_a_stopped_process_is_noticed_within_a_second() -> None:
    process = Process(state=lambda now: "T" if now - 1000 * S >= 3 * S else "S")
    process.answers = process.listens = until(3)
    world = World(process)
    assert world.run(2.9) == []
    world.run(3)
    at, hang = world.hangs[0]
    assert at - 3 * S < S
    assert "stopped" in hang.cause and hang.outside


def test_a_process_that_was_stopped_for_a_moment_goes_on() -> None:
    looked_once = 3 * S, 3 * S + PERIOD - 20 * MS
    process = Process(
        state=lambda now: "T" if looked_once[0] <= now - 1000 * S < looked_once[1] else "S"
    )
    assert World(process).run(20) == []


def test_a_process_under_a_debugger_goes_on() -> None:
    process = Process(state=lambda now: "t", answers=never, listens=never, main_share=0.0)
    assert World(process).run(60) == []


def test_a_silent_process_that_sleeps_is_hung() -> None:
    world = World(Process(answers=until(3), listens=until(3), main_share=0.0))
    world.run(10)
    at, hang = world.hangs[0]
    assert SILENCE <= at - 3 * S < S
    assert "silent" in hang.cause and not hang.outside


def test_threads_that_poll_for_the_interpreter_save_nobody() -> None:
    """They want a core for an instant every few milliseconds; now and then a look meets one."""
    world = World(Process(answers=until(3), listens=until(3), main_share=0.0))
    world.process.eager = lambda now: now % (3 * PERIOD) < PERIOD // 2
    world.run(10)
    at, hang = world.hangs[0]
    assert at - 3 * S < S
    assert "silent" in hang.cause


@pytest.mark.parametrize(
    "why",
    [
        Process(eager=lambda now: True),  # waits for a core all the time
        Process(state=lambda now: "R"),
        Process(state=lambda now: "D"),  # waits for the disk
        Process(share=0.1),  # gets a little of a core
        Process(eager=lambda now: now // (S // 4) % 2 == 0),  # is seen to want one now and then
    ],
    ids=["waiting", "running", "disk", "little", "now and then"],
)
def test_a_starved_process_is_not_hung(why: Process) -> None:
    why.answers = why.listens = until(3)
    assert World(why).run(60) == []


def test_a_late_answer_counts() -> None:
    """Silent for just less than what is allowed, again and again."""
    process = Process(main_share=0.0)
    process.answers = process.listens = lambda since: since % (SILENCE - 20 * MS) < 20 * MS
    assert World(process).run(60) == []


def test_a_manager_that_was_away_blames_nobody() -> None:
    """All of it was stopped, and the worker is the last to go on."""

    away = between(4.7, 25.2)
    stopped = between(4.7, 25.2)
    process = Process(
        state=lambda now: "T" if stopped(now - 1000 * S) else "S",
        answers=lambda since: not away(since),
        listens=lambda since: not away(since),
        main_share=0.0,
    )
    world = World(process)
    world.asleep = between(5, 25)
    assert world.run(60) == []
    assert world.beat.lapses == 1


def test_a_manager_that_was_away_still_finds_the_hung() -> None:
    world = World(Process(answers=until(10), listens=until(10), main_share=0.0))
    world.asleep = between(5, 25)
    world.run(25)
    assert world.hangs == []
    world.run(10)
    assert len(world.hangs) >= 1


def test_a_controller_that_was_away_blames_nobody() -> None:
    """What it had not sent, or not delivered: depending on when it fell asleep."""
    for moment in range(0, 200, 10):
        world = World(Process(main_share=0.0))
        world.controller_asleep = between(5 + moment / 1e3, 25)
        assert world.run(40) == [], moment


def test_a_main_loop_that_does_not_move_is_hung_though_pongs_come() -> None:
    world = World(Process(listens=until(3), main_share=0.0, share=0.8, eager=lambda now: True))
    world.run(10)
    at, hang = world.hangs[0]
    assert PATIENCE <= at - 3 * S <= PATIENCE + 2 * ASK + 2 * PERIOD
    assert "main loop" in hang.cause


def test_a_main_loop_that_runs_for_ever_is_hung_in_the_end() -> None:
    world = World(Process(listens=until(3), main_share=0.9, share=0.9, state=lambda now: "R"))
    world.run(60)
    at, _ = world.hangs[0]
    assert 10 * PATIENCE <= at - 3 * S <= 12 * PATIENCE


def test_a_main_loop_that_gets_little_time_is_not_hung() -> None:
    """It waits for a lock that others always get first."""
    assert World(Process(listens=lambda since: since % (10 * S) < S)).run(60) == []


def test_a_computation_that_keeps_the_interpreter_is_not_hung() -> None:
    """Neither thread can answer meanwhile. Then the control thread comes first; the main loop has
    its turn only now and then."""

    def answers(since: int) -> bool:
        return since % (3 * S) < 100 * MS

    def listens(since: int) -> bool:
        return answers(since) and since // (3 * S) % 3 == 2

    process = Process(
        answers=answers,
        listens=listens,
        share=1.0,
        main_share=0.0,
        eager=lambda now: True,
    )
    assert World(process).run(60) == []


def test_a_process_that_does_not_serve_yet_is_judged_by_being_stopped_alone() -> None:
    beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
    asleep = Vitals("S", 0, 0, False)
    for n in range(100):
        assert beat.look({WORKER: asleep}, n * PERIOD) == []
        beat.pong(WORKER, n, 0, n * PERIOD)
    stopped = Vitals("T", 0, 0, False)
    assert beat.look({WORKER: stopped}, 100 * PERIOD) == []
    (hang,) = beat.look({WORKER: stopped}, 101 * PERIOD)
    assert hang.incarnation == WORKER


def looks(beat: Heartbeat, states: str) -> list[list[Hang]]:
    """What is found in one look after the other, each when it is due."""
    return [beat.look({WORKER: Vitals(s, 0, 0, False)}, beat.deadline() or 0) for s in states]


@pytest.mark.parametrize("states", ["TSTSTS", "TttttttT"], ids=["now and then", "traced"])
def test_who_goes_on_in_between_is_not_stopped_for_long(states: str) -> None:
    assert not any(looks(Heartbeat(PERIOD, SILENCE, PATIENCE), states))


def test_a_late_look_does_not_say_that_it_was_stopped_all_the_time() -> None:
    beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
    stopped = {WORKER: Vitals("T", 0, 0, False)}
    assert not beat.look(stopped, 0) and not beat.look(stopped, 3 * PERIOD)
    assert beat.lapses == 1
    assert beat.look(stopped, 4 * PERIOD)


def test_who_is_stopped_is_found_though_the_controller_is_away() -> None:
    beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
    for seq in (1, 2):
        beat.asked(seq, [WORKER])
    assert [len(found) for found in looks(beat, "TT")] == [0, 1]
    assert beat.lapses == 2


def test_a_debugger_that_lets_go_gives_the_time_of_a_whole_silence() -> None:
    beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
    beat.asked(1, [WORKER])
    beat.echoed(1, 0)
    assert not any(looks(beat, "S" + "t" * 20))
    now = beat.deadline() or 0
    beat.asked(2, [WORKER])
    beat.echoed(2, now)
    assert now > SILENCE and not any(looks(beat, "S"))


def test_an_answer_to_a_later_ping_is_one_to_those_that_were_lost() -> None:
    beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
    for seq in (1, 2):
        beat.asked(seq, [WORKER])
        beat.echoed(seq, seq)
    beat.pong(WORKER, 2, 2, 3)
    assert beat.suspects() == set()


def test_a_main_loop_that_waits_for_a_core_is_not_taken_for_one_that_sleeps() -> None:
    process = Process(listens=until(3), main_share=0.0, state=lambda now: "SR"[now // (S // 2) % 2])
    assert World(process).run(3 + 5 * PATIENCE / S) == []


def test_the_dead_are_forgotten() -> None:
    beat = Heartbeat(PERIOD, SILENCE, PATIENCE)
    beat.asked(1, [WORKER])
    beat.echoed(1, 0)
    assert beat.suspects() == {WORKER}
    beat.forget(WORKER)
    assert beat.suspects() == set()


# --- what the kernel says ------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import sys, time; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def test_vitals_of_a_process(sleeper: subprocess.Popen[bytes]) -> None:
    seen = read_vitals(sleeper.pid, every_thread=True)
    assert seen is not None
    assert not seen.stopped and not seen.traced
    assert seen.main_cpu_ns > 0
    sleeper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, sleeper.pid, os.WSTOPPED | os.WNOWAIT)
    stopped = read_vitals(sleeper.pid)
    assert stopped is not None and stopped.stopped and not stopped.eager
    me = read_vitals(os.getpid(), every_thread=True)
    assert me is not None and me.eager and me.main_cpu_ns > 0
    sleeper.kill()
    sleeper.wait()
    assert read_vitals(sleeper.pid) is None


def test_a_name_with_anything_in_it_is_read(tmp_path: Path) -> None:
    odd = tmp_path / "a) R 1 ("
    odd.symlink_to(sys.executable)
    with subprocess.Popen([str(odd), "-c", "input()"], stdin=subprocess.PIPE) as process:
        seen = read_vitals(process.pid)
        assert seen is not None and len(seen.state) == 1
        process.kill()
