"""Every instruction-set tier passes the tests of the ops: each runs in a process of its own.

That the linear kernels of all tiers give the same bits is in test_kernels_linear.py and
test_kernels_moe.py, that none touches a byte outside of its arrays in test_kernels_bounds.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from spikeinfer.kernels import cpu_tier

TIERS = ("scalar", "avx2", "avx512", "avx512_bf16")
FILES = ("test_ops_attention.py", "test_ops_folded.py", "test_ops_rows.py", "test_ops_weights.py")


@pytest.mark.parametrize("tier", TIERS)
def test_tier(tier: str, tiers: tuple[str, ...]) -> None:
    if tier == cpu_tier() or tier not in tiers:
        pytest.skip(f"{tier} is the tier of this run already, or more than this CPU has")
    here = Path(__file__).parent
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *(str(here / f) for f in FILES)],
        env=os.environ | {"SPIKE_CPU": tier},
        cwd=here.parent.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:]
