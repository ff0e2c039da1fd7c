"""10^5 operations on a pool of KV blocks; the driver is the unit test's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).parents[1] / "unit" / "test_blocks.py"


@pytest.mark.parametrize("recent", [0, 1, 2])
def test_a_hundred_thousand_operations(recent: int) -> None:
    spec = importlib.util.spec_from_file_location("block_driver", DRIVER)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["block_driver"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PoolDriver(17 + recent, recent).run(100_000)
