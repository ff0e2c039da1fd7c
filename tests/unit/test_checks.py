"""Policies and other options out of range: one error that names the option."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spikeinfer import SamplingParams, SpikeError
from spikeinfer.runtime.batch_window import WindowPolicy
from spikeinfer.runtime.chunking import ChunkPolicy
from spikeinfer.runtime.kv_tier import TierOptions
from spikeinfer.runtime.length_order import LengthPolicy
from spikeinfer.runtime.qos import ALLOWANCES, QosPolicy
from spikeinfer.runtime.scheduler import SchedulingPolicy

WRONG: list[tuple[Callable[..., Any], str, list[Any]]] = [
    (ChunkPolicy, "slack", [-1, math.nan, "2", None]),
    (ChunkPolicy, "seconds", [-0.1, math.nan, True]),
    (ChunkPolicy, "unmeasured", [0, 1.5, None]),
    (WindowPolicy, "objective", [-1, math.inf, "fast"]),
    (WindowPolicy, "least", [-1, None]),
    (WindowPolicy, "most", [-1, math.nan]),
    (WindowPolicy, "increase", [-1e-3, math.inf]),
    (WindowPolicy, "decrease", [-0.5, 1.5]),
    (LengthPolicy, "model", [3, b"x"]),
    (LengthPolicy, "every", [-1, math.nan]),
    (LengthPolicy, "budget", [-1, None]),
    (LengthPolicy, "seconds_per_token", [-1, 10**400]),
    (LengthPolicy, "most", [-1, math.inf]),
    (QosPolicy, "allowances", [None, {}, {"batch": 1.0}, {**ALLOWANCES, "extra": 1.0}]),
    (SchedulingPolicy, "qos", [None, ALLOWANCES]),
    (SchedulingPolicy, "chunks", [64, ChunkPolicy]),
    (SchedulingPolicy, "window", [0.5]),
    (SchedulingPolicy, "lengths", ["length.onnx"]),
    (SchedulingPolicy, "prefix_cache", [1, None]),
]


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [(make, name, value) for make, name, values in WRONG for value in values],
    ids=str,
)
def test_policies_out_of_range(make: Callable[..., Any], name: str, value: Any) -> None:
    with pytest.raises(SpikeError, match=f"SPK608.*{name}"):
        make(**{name: value})


def test_a_class_without_seconds() -> None:
    with pytest.raises(SpikeError, match=r"SPK608.*allowances of batch"):
        QosPolicy({**ALLOWANCES, "batch": math.nan})


def test_a_window_whose_bounds_are_crossed() -> None:
    with pytest.raises(SpikeError, match=r"SPK608.*most"):
        WindowPolicy(least=0.5, most=0.1)


def test_what_is_in_range() -> None:
    SchedulingPolicy(ALL := QosPolicy(), ChunkPolicy(math.inf, 0.0, 1), WindowPolicy(0.5, 0, 0))
    assert ALL.rank("batch", 1.0) == 31.0


@pytest.mark.parametrize(
    ("directory", "size"), [(None, 1 << 20), (3, 1), (Path(), None), (Path(), 1.5), (Path(), True)]
)
def test_no_file_for_evicted_blocks(directory: Any, size: Any) -> None:
    with pytest.raises(SpikeError, match="SPK618"):
        TierOptions(directory, size)


def test_two_grammars() -> None:
    with pytest.raises(SpikeError, match=r"SPK608.*regex and grammar were given together"):
        SamplingParams(regex="a", grammar="start: /a/")
