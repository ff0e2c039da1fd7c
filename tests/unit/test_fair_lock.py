"""The lock that is handed over in the order of asking."""

from __future__ import annotations

import threading
import time

from spikeinfer.runtime.fair_lock import FairLock


def wait_for_waiters(lock: FairLock, count: int) -> None:
    while len(lock._waiters) < count:
        time.sleep(0.001)


def test_waiters_get_it_in_order_and_before_who_released() -> None:
    lock, order = FairLock(), []

    def wait(name: int) -> None:
        with lock:
            order.append(name)

    lock.acquire()
    threads = [threading.Thread(target=wait, args=(name,)) for name in range(4)]
    for count, thread in enumerate(threads, 1):
        thread.start()
        wait_for_waiters(lock, count)
    lock.release()
    with lock:  # a plain lock could be taken again at once
        order.append(99)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 99]


def test_asking_without_waiting() -> None:
    lock = FairLock()
    assert lock.acquire(blocking=False)
    assert not lock.acquire(blocking=False)
    lock.release()
    assert lock.acquire(blocking=False)


def test_who_gives_up_waiting_leaves_no_gap() -> None:
    lock, done = FairLock(), []
    lock.acquire()
    turn = threading.Lock()
    lock._waiters.append(turn)
    lock._leave_queue(turn)  # what an interrupted `acquire` does
    thread = threading.Thread(target=lambda: (lock.acquire(), done.append(1)))
    thread.start()
    wait_for_waiters(lock, 1)
    lock.release()
    thread.join(10)
    assert done == [1]
