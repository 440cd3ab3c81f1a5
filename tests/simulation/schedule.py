"""One thread of virtual time: everything that happens in a simulated life happens here, by one seed.

Work is written as generators. A generator yields what it waits for: seconds (of the clock of whoever runs
it), a `Signal`, or a `Signal` with a limit in seconds. Two things due at the same moment happen in the order
in which they were put in.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

TICK_S = 1e-6
"""No wait is shorter than this, unless it is none."""

Wait = float | int | tuple[Any, float] | Any
Work = Generator[Wait, None, Any]


class KilledError(BaseException):
    """The process that runs this work died at this point; nothing of it goes on, not even `finally`."""


class Signal:
    """Something to wait for: set once, or again and again after `clear`."""

    __slots__ = ("is_set", "value", "waiters")

    def __init__(self) -> None:
        self.is_set = False
        self.value: Any = None
        self.waiters: list[tuple[Task, int]] = []

    def set(self, value: Any = None) -> None:
        self.is_set, self.value = True, value
        waiters, self.waiters = self.waiters, []
        for task, turn in waiters:
            task.wake(turn)

    def clear(self) -> None:
        self.is_set = False


class Scheduler:
    """Virtual time and the queue of what is due."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        # Work of a dead process is kept, for its `finally` blocks must not run when memory is tidied up.
        self.tasks: list[Task] = []

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), self._count, act))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, act = heapq.heappop(queue)
            act()
        self.now = until

    # ---- chance, under names that read well

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.random.random()


@dataclass(slots=True)
class Process:
    """Something that can be killed or stand still, with a monotonic clock of its own.

    The clock runs at `rate` of true time from `offset`. A process that stands still misses nothing: what
    was due meanwhile happens, in order, when it goes on.
    """

    scheduler: Scheduler
    rate: float = 1.0
    offset: float = 0.0
    is_alive: bool = True
    paused_until: float = 0.0

    def clock(self) -> float:
        return self.scheduler.now * self.rate + self.offset

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do something after so many seconds of this process's clock, if it is alive then."""
        # A wait so short that the sum would not move would never end.
        delay_s = max(delay_s / self.rate, TICK_S) if delay_s > 0 else 0.0
        self.scheduler.after(delay_s, lambda: self._fire(act))

    def _fire(self, act: Callable[[], None]) -> None:
        if not self.is_alive:
            return
        if self.scheduler.now < self.paused_until:
            self.scheduler.after(self.paused_until - self.scheduler.now, lambda: self._fire(act))
        else:
            act()

    def spawn(self, work: Work, done: Callable[[Task], None] | None = None) -> Task:
        return Task(self, work, done)


class Task:
    """One piece of work of one process. `error` is what it failed by, `result` what it returned."""

    __slots__ = ("_done", "_process", "_turn", "_work", "error", "finished", "is_cancelled", "result")

    def __init__(self, process: Process, work: Work, done: Callable[[Task], None] | None) -> None:
        self._process, self._work, self._done = process, work, done
        process.scheduler.tasks.append(self)
        self._turn = 0
        self.error: Exception | None = None
        self.result: Any = None
        self.is_cancelled = False
        self.finished = Signal()
        self._later(0.0)

    def cancel(self) -> None:
        """End the work where it waits; its `finally` blocks run. Work that ended stays as it is."""
        if not self.finished.is_set:
            self.is_cancelled = True
            self._work.close()
            self._finish()

    def wake(self, turn: int) -> None:
        if turn == self._turn and not self.finished.is_set:
            self._later(0.0)

    def _later(self, delay_s: float) -> None:
        turn = self._turn
        self._process.after(delay_s, lambda: self._step(turn))

    def _step(self, turn: int) -> None:
        if turn != self._turn or self.finished.is_set:
            return
        self._turn += 1
        try:
            waits = next(self._work)
        except StopIteration as stop:
            self.result = stop.value
            self._finish()
        except KilledError:
            self._process.is_alive = False
        except Exception as error:  # what a task fails by is its owner's to judge
            self.error = error
            self._finish()
        else:
            self._wait(waits)

    def _wait(self, waits: Wait) -> None:
        signal, limit_s = waits if isinstance(waits, tuple) else (waits, None)
        if not isinstance(signal, Signal):
            self._later(signal)
            return
        if signal.is_set:
            self._later(0.0)
            return
        signal.waiters.append((self, self._turn))
        if limit_s is not None:
            self._later(max(0.0, limit_s))

    def _finish(self) -> None:
        self.finished.set()
        if self._done is not None:
            self._done(self)
