"""Heartbeat: who hangs? Pure: pings, pongs, looks at the processes and the time come in.

A process that is killed by mistake costs more than one that is noticed a second later, so a missed
answer alone condemns nobody. It takes two signals that agree:

* *stopped*: the kernel says so, at all looks of a period;
* *silent*: it has not answered a ping, and all that time no thread of it ran, waited for a core or
  for the disk, and it has used no cpu time to speak of. A process that is starved looks otherwise;
* *deaf*: its control thread answers ping after ping, so it gets cpu time and the interpreter, but
  its main loop has not seen one for so long, and its main thread has not run once in that time (or
  has run for many times as long and still not seen it).

And the observer must have been awake himself. When the Manager looks later than he meant to, or the
Controller's thread has not yet handed out what it was given, the evidence is dropped: he would
blame others for his own delay. For the same reason silence begins only when the Controller says
that a ping has left, and lasts no longer than until he last proved that he delivers what comes.

Only who serves is asked. A process that still loads may keep the interpreter to itself for seconds;
it is judged by whether it is stopped, and by the time that a start may take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from blockflow.launch.vitals import Vitals

_IDLE_SHARE = 0.05
"""Cpu time that an idle process may use (KPI samples, answers) and still count as asleep."""
_IDLE_NS = 20_000_000
"""Two ticks of the kernel's cpu clock: less is not measured."""
_SPIN = 10
"""A main loop that runs all the time must be deaf this many times longer."""
_HASTE = 2.5
"""Looks come so much sooner while somebody owes an answer."""


@dataclass(frozen=True, slots=True)
class Hang:
    """A process to be replaced, and why. ``outside``: by nothing that it was executing."""

    incarnation: int
    cause: str
    outside: bool = False


@dataclass(slots=True)
class _Pulse:
    """What is known of one process. Times are when the evidence begins; None = there is none."""

    serving: bool = False
    stopped_ns: int | None = None
    asked: int | None = None
    asked_ns: int | None = None
    answered_ns: int = 0
    unheard: int | None = None
    unheard_ns: int = 0
    asleep_ns: int | None = None
    asleep_cpu_ns: int = 0
    eager: bool = False
    still_ns: int | None = None
    still_cpu_ns: int = 0

    def drop_silence(self) -> None:
        """Whatever speaks of silence and deafness begins anew."""
        self.asleep_ns = self.still_ns = None


class Heartbeat:
    """The evidence, per incarnation.

    Args:
        period_ns: time between two looks.
        silence_ns: how long a process may be silent.
        patience_ns: how long it may be deaf.
    """

    def __init__(self, period_ns: int, silence_ns: int, patience_ns: int) -> None:
        self._period_ns = period_ns
        self._silence_ns = silence_ns
        self._patience_ns = patience_ns
        self._pulses: dict[int, _Pulse] = {}
        self._due_ns: int | None = None
        self._unechoed = 0
        self._echoed_ns = 0
        self.lapses = 0
        """How often the observer himself was late."""

    def deadline(self) -> int | None:
        """When the next look is due; None = at once."""
        return self._due_ns

    # --- what happens ---------------------------------------------------------------------------

    def asked(self, seq: int, incarnations: Iterable[int]) -> None:
        """Ping ``seq`` was given to the Controller for these processes."""
        self._unechoed += 1
        for incarnation in incarnations:
            pulse = self._pulses.setdefault(incarnation, _Pulse())
            pulse.serving = True
            if pulse.asked is None:
                pulse.asked, pulse.asked_ns = seq, None

    def echoed(self, seq: int, now_ns: int) -> None:
        """The Controller has handed out ping ``seq``, and delivered what had come before that."""
        self._unechoed -= 1
        self._echoed_ns = now_ns
        for pulse in self._pulses.values():
            if pulse.asked is not None and pulse.asked <= seq and pulse.asked_ns is None:
                pulse.asked_ns = now_ns

    def pong(self, incarnation: int, seq: int, heard: int, now_ns: int) -> None:
        """An answer; late ones count as well as punctual ones."""
        pulse = self._pulses.get(incarnation)
        if pulse is None or not pulse.serving:
            return
        gap, pulse.answered_ns = now_ns - pulse.answered_ns, now_ns
        if pulse.asked is not None and seq >= pulse.asked:
            pulse.asked = pulse.asked_ns = None
        if pulse.unheard is not None and heard >= pulse.unheard:
            pulse.unheard = None
        if pulse.unheard is None and heard < seq:
            pulse.unheard, pulse.unheard_ns = seq, now_ns
        elif gap > self._patience_ns // 2:
            # It could not answer meanwhile, so its main loop may have had no chance to listen.
            pulse.unheard_ns = now_ns

    def forget(self, incarnation: int) -> None:
        """The process is dead, or none of ours to judge any more."""
        self._pulses.pop(incarnation, None)

    # --- judging --------------------------------------------------------------------------------

    def suspects(self) -> set[int]:
        """Processes with a ping unanswered: look at all their threads."""
        return {i for i, p in self._pulses.items() if p.asked_ns is not None}

    def look(self, vitals: Mapping[int, Vitals], now_ns: int) -> list[Hang]:
        """Judge by what was just seen of the processes that may be judged at all.

        Args:
            vitals: incarnation -> what the kernel says; who is not among them is not judged.
            now_ns: the time of the look.
        """
        due = self._due_ns
        haste = _HASTE if self.suspects() else 1
        self._due_ns = now_ns + int(self._period_ns / haste)
        late = due is not None and now_ns - due > self._period_ns
        if late or self._unechoed > 1:  # the Manager's thread, or the Controller's
            self.lapses += 1
            for pulse in self._pulses.values():
                pulse.drop_silence()
                if late:
                    pulse.stopped_ns = None
        hangs = []
        for incarnation, seen in vitals.items():
            pulse = self._pulses.setdefault(incarnation, _Pulse())
            cause = self._judge(pulse, seen, now_ns)
            if cause:
                del self._pulses[incarnation]
                hangs.append(Hang(incarnation, cause, outside=seen.stopped))
        return hangs

    def _judge(self, pulse: _Pulse, seen: Vitals, now: int) -> str:
        if seen.traced:
            pulse.stopped_ns = None
            pulse.drop_silence()
            return ""
        if not seen.stopped:
            pulse.stopped_ns = None
        elif pulse.stopped_ns is None:
            pulse.stopped_ns = now
        elif now - pulse.stopped_ns >= self._period_ns:
            return f"hung: stopped for {(now - pulse.stopped_ns) / 1e9:.1f} s"
        self._note_sleep(pulse, seen, now)
        silent = self._since(self._echoed_ns, pulse.asked_ns, pulse.asleep_ns)
        if silent >= self._silence_ns and not seen.eager:
            return f"hung: silent and asleep for {silent / 1e9:.1f} s"
        if pulse.unheard is None:
            return ""
        deaf = self._since(pulse.answered_ns, pulse.unheard_ns, pulse.still_ns)
        if deaf >= self._patience_ns:
            return f"hung: its main loop has not moved for {deaf / 1e9:.1f} s"
        spin = pulse.answered_ns - pulse.unheard_ns
        if spin >= _SPIN * self._patience_ns:
            return f"hung: its main loop has not listened for {spin / 1e9:.1f} s"
        return ""

    def _note_sleep(self, pulse: _Pulse, seen: Vitals, now: int) -> None:
        """Since when all of it sleeps, and since when its main thread has not run."""
        if pulse.asleep_ns is not None:
            allowed = max(_IDLE_NS, int((now - pulse.asleep_ns) * _IDLE_SHARE))
            # Threads that wait for the interpreter's lock look for it every five milliseconds, for
            # microseconds: now and then a look meets one. Who is starved wants a core at every one.
            starved = seen.eager and pulse.eager
            if starved or seen.cpu_ns - pulse.asleep_cpu_ns > allowed:
                pulse.asleep_ns = None
        pulse.eager = seen.eager
        if pulse.asleep_ns is None and not seen.eager:
            pulse.asleep_ns, pulse.asleep_cpu_ns = now, seen.cpu_ns
        if pulse.still_ns is not None and (
            seen.main_eager or seen.main_cpu_ns != pulse.still_cpu_ns
        ):
            pulse.still_ns = None
        if pulse.still_ns is None and not seen.main_eager:
            pulse.still_ns, pulse.still_cpu_ns = now, seen.main_cpu_ns

    @staticmethod
    def _since(now: int, first: int | None, second: int | None) -> int:
        """How long both have held."""
        return 0 if first is None or second is None else now - max(first, second)
