"""The comparison with llama.cpp: what its table may say, and the pipe to a measured program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
OWN = ("compare_llama_cpp", "accuracy", "peers_llama_cpp", "worker")
FIGURES = {
    "llama.cpp": {"decode tok/s, context 32": 100.0, "weights MB": 200.0, "mean KL": 0.05},
    "spikeinfer": {"decode tok/s, context 32": 150.0, "weights MB": 210.0, "mean KL": 0.04},
}


@pytest.fixture(scope="module")
def compare() -> Iterator[ModuleType]:
    """`benchmarks/compare_llama_cpp.py`, a script beside its own modules."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import compare_llama_cpp

        yield compare_llama_cpp
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in OWN:
            sys.modules.pop(name, None)


def cells(text: str, name: str) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).strip()


def test_ratios_are_ours_over_theirs(compare: ModuleType) -> None:
    text = compare.table(FIGURES, {"decode tok/s, context 32": 1.48}, quiet=True)
    # The median of the rounds' ratios, not the ratio of the medians.
    assert cells(text, "decode tok/s, context 32").split() == ["100.0", "150.0", "1.480"]
    assert cells(text, "weights MB").split() == ["200.0", "210.0", "1.050"]


def test_a_side_that_did_not_run_has_no_ratio(compare: ModuleType) -> None:
    text = compare.table({"llama.cpp": FIGURES["llama.cpp"]}, {}, quiet=True)
    for name in FIGURES["llama.cpp"]:
        assert cells(text, name).endswith("did not run        -")


def test_times_have_no_ratio_on_a_busy_machine(compare: ModuleType) -> None:
    text = compare.table(FIGURES, {"decode tok/s, context 32": 1.48}, quiet=False)
    assert cells(text, "decode tok/s, context 32").split()[-1] == "-"
    assert cells(text, "mean KL").split()[-1] == "0.800"


def test_busy_share_is_a_share(compare: ModuleType) -> None:
    assert 0.0 <= compare.busy_share(0.02) <= 1.0


ECHO = """
import json, os, struct, sys
for line in sys.stdin:
    command = json.loads(line)
    if command["do"] == "score":
        rows = command["tokens"][command["first"]:]
        os.write(1, json.dumps({"shape": [len(rows), 2]}).encode() + b"\\n")
        os.write(1, b"".join(struct.pack("2f", t, -t) for t in rows))
    elif command["do"] == "die":
        sys.exit(3)
    else:
        os.write(1, json.dumps({"error": "no " + command["do"]}).encode() + b"\\n")
"""


def test_logits_come_through_the_pipe_whole(compare: ModuleType) -> None:
    with compare.Worker([sys.executable, "-c", ECHO]) as worker:
        for _ in range(2):  # the second answer begins where the first one ended
            logits = worker.score(list(range(30_000)), 10)
            np.testing.assert_array_equal(logits[:, 0], np.arange(10, 30_000))
            np.testing.assert_array_equal(logits[:, 1], -logits[:, 0])


def test_errors_and_deaths_of_a_worker_are_told(compare: ModuleType) -> None:
    with compare.Worker([sys.executable, "-c", ECHO]) as worker:
        with pytest.raises(RuntimeError, match="open: no open"):
            worker.call({"do": "open"})
        with pytest.raises(RuntimeError, match="ended with 3 at die"):
            worker.call({"do": "die"})


def test_the_held_out_text_gives_enough_windows(compare: ModuleType) -> None:
    accuracy = sys.modules["accuracy"]
    text = accuracy.HELD_OUT.read_text(encoding="utf-8")
    golden = BENCHMARKS.parent / "compiler/golden/prose.txt"
    assert len(text.split()) > 3000  # about 3,500 tokens: twelve windows, each half scored
    shared = set(text.split("\n\n")) & set(golden.read_text(encoding="utf-8").split("\n\n"))
    assert shared == set()
