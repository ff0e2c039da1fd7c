"""A lock that is handed over in the order of asking.

`threading.Lock` lets the thread that gives it up take it again at once: with several streams read
by several threads, one would run to its end before another could even be queued.
"""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """First come, first served; a context manager; not reentrant."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._waiters: deque[threading.Lock] = deque()
        self._held = False

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; with ``blocking=False`` only when nobody holds it."""
        with self._mutex:
            if not self._held:
                self._held = True
                return True
            if not blocking:
                return False
            turn = threading.Lock()
            turn.acquire()
            self._waiters.append(turn)
        try:
            turn.acquire()
        except BaseException:  # interrupted while waiting
            self._leave_queue(turn)
            raise
        return True

    def release(self) -> None:
        """Hand the lock to who waits longest; it stays held then."""
        with self._mutex:
            if self._waiters:
                self._waiters.popleft().release()
            else:
                self._held = False

    def _leave_queue(self, turn: threading.Lock) -> None:
        with self._mutex:
            if turn in self._waiters:
                self._waiters.remove(turn)
                return
        self.release()  # it was handed over at the same moment

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()
