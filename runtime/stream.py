"""A request's text as it comes: an iterator that runs the batch loop when it has nothing to give.

There is no thread behind it. Whoever waits for a piece runs a step for everybody, so streams read
side by side (in one thread or several) share their steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self

from .closing import Closing
from .fair_lock import FairLock
from .loop import BatchLoop
from .sequence import Completion, Piece, Request


class TokenStream(Closing, Iterator[str]):
    """Text pieces of one request. Made by `SpikeEngine.stream`; begins when first read.

    Closing it (or dropping it, or leaving its `with` block) ends the request.
    """

    def __init__(self, loop: BatchLoop, lock: FairLock, request: Request) -> None:
        self._loop = loop
        self._lock = lock
        self._request = request
        self._submitted = False

    @property
    def completion(self) -> Completion:
        """What has come so far; complete when the iteration has ended."""
        return self._request.completion()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """The next text, at least one character.

        Raises:
            SpikeError: SPK609, SPK616, the request failed.
        """
        while (piece := self._next_piece()) is not None:
            if piece.text:
                return piece.text
        raise StopIteration

    def pieces(self) -> Iterator[Piece]:
        """The same texts with their tokens and log probabilities; takes them from the iteration.

        Raises:
            SpikeError: SPK609, SPK616, the request failed.
        """
        while (piece := self._next_piece()) is not None:
            yield piece

    def _next_piece(self) -> Piece | None:
        request = self._request
        while not request.pieces and not request.finished:
            self._advance(until_piece=True)
        if request.pieces:
            return request.pieces.popleft()
        if request.error is not None:
            raise request.error
        return None

    def run(self) -> None:
        """Run to the end; the pieces stay to be read."""
        while not self._request.finished:
            self._advance(until_piece=False)

    def _advance(self, until_piece: bool) -> None:
        """Run a step, unless another reader's step has served this one meanwhile."""
        request, delay = self._request, 0.0
        with self._lock:
            self.submit_locked()
            if not request.finished and not (until_piece and request.pieces):
                delay = self._loop.step()
        if delay:
            time.sleep(delay)  # the batching window: others may join

    def submit_locked(self) -> None:
        """Join the batch, once; the caller holds the lock."""
        if not self._submitted:
            if not self._request.finished:  # a grammar may force all of it
                self._loop.add(self._request)
            self._submitted = True

    def close(self) -> None:
        """End the request now: its blocks are free when this returns."""
        if not self._request.finished:
            with self._lock:
                self._loop.cancel(self._request)

    def abandon(self) -> None:
        """End the request without waiting: its blocks are free before the next step begins."""
        self._request.abandoned = True
        if self._lock.acquire(blocking=False):
            try:
                self._loop.sweep()
            finally:
                self._lock.release()

    def __del__(self) -> None:
        # May run anywhere, also in a thread that holds the lock: only leave a mark.
        if getattr(self, "_submitted", False) and not self._request.finished:
            self._request.abandoned = True
