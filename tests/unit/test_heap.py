"""Room on the C heap for reading a tokenizer, and what is left of it afterwards."""

import ctypes
import subprocess
import sys

import pytest
from spikeinfer.runtime import heap

MB = 1 << 20
# In a new process: this one's heap may hold anything. Pieces of this size come from the C heap.
MEASURED = """
from pathlib import Path
from spikeinfer.runtime.heap import roomy_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

before = resident()
try:
    with roomy_heap():
        blocks = [b"x" * 1000 + bytes([i % 256]) for i in range(20_000)]
        print(resident() - before)
        blocks.clear()
        if FAILS:
            raise KeyError
except KeyError:
    print("failed")
print(resident() - before)
"""


def measured(fails: bool) -> list[str]:
    """Lines that MEASURED prints."""
    script = MEASURED.replace("FAILS", str(fails))
    command = [sys.executable, "-P", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_memory_that_is_freed_within_goes_back() -> None:
    within, after = measured(fails=False)
    assert int(within) > 15 * MB
    assert int(after) < 5 * MB


def test_an_error_comes_through_and_memory_goes_back() -> None:
    _, error, after = measured(fails=True)
    assert error == "failed"
    assert int(after) < 5 * MB


def test_what_is_kept_stays_whole() -> None:
    def allocations(count: int) -> list[bytes]:
        return [b"x" * 1000 + bytes([i % 256]) for i in range(count)]

    with heap.roomy_heap():
        kept = allocations(5_000)
        allocations(20_000).clear()
    assert kept == allocations(5_000)


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        """Has none of glibc's own calls."""

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    with heap.roomy_heap():
        pass
