"""Room on the C heap for reading a tokenizer, and what is left of it afterwards."""

import ctypes
import multiprocessing
from collections.abc import Callable
from pathlib import Path

import pytest
from spikeinfer.runtime import heap

MB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def allocations(size: int) -> list[bytes]:
    """So many bytes in pieces that come from the C heap."""
    return [b"x" * 1000 + bytes([i % 256]) for i in range(size // 1000)]


def in_a_child(work: Callable[[], None]) -> None:
    """Here the heap may hold anything; in a new process it is small."""
    child = multiprocessing.get_context("spawn").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0


def freed_memory_goes_back() -> None:
    before = resident()
    with heap.roomy_heap():
        blocks = allocations(20 * MB)
        assert resident() > before + 15 * MB
        blocks.clear()
    assert resident() < before + 5 * MB


def test_memory_that_is_freed_within_goes_back() -> None:
    in_a_child(freed_memory_goes_back)


def test_what_is_kept_stays_whole() -> None:
    with heap.roomy_heap():
        kept = allocations(5 * MB)
        allocations(20 * MB).clear()
    assert kept == allocations(5 * MB)


def an_error_comes_through() -> None:
    def fail() -> None:
        allocations(20 * MB)
        raise KeyError

    before = resident()
    with pytest.raises(KeyError), heap.roomy_heap():
        fail()
    assert resident() < before + 5 * MB


def test_an_error_comes_through_and_memory_goes_back() -> None:
    in_a_child(an_error_comes_through)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Has none of glibc's own calls."""

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    with heap.roomy_heap():
        pass
