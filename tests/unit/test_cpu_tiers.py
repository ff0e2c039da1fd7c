"""Which instructions a CPU's features allow, and what SPIKE_CPU says about it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from spikeinfer import kernels
from spikeinfer.compiler.engine.cpu_features import missing_cpu_features

TIERS = ("scalar", "avx2", "avx512", "avx512_bf16")
AVX2 = ("avx2", "fma", "f16c")
AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")


def test_what_each_tier_needs() -> None:
    assert [f.name for f in kernels.cpu_features()] == [*AVX2, *AVX512, "avx512_bf16"]
    assert {f.name: f.tier for f in kernels.cpu_features()} == {
        **dict.fromkeys(AVX2, "avx2"),
        **dict.fromkeys(AVX512, "avx512"),
        "avx512_bf16": "avx512_bf16",
    }
    assert kernels.best_tier([*AVX2, *AVX512, "avx512_bf16"]) == "avx512_bf16"
    assert kernels.best_tier([*AVX2, *AVX512]) == "avx512"
    assert kernels.best_tier([]) == "scalar"


@pytest.mark.parametrize("missing", AVX512)
def test_without_one_of_avx512_there_is_avx2(missing: str) -> None:
    assert kernels.best_tier(f for f in (*AVX2, *AVX512) if f != missing) == "avx2"


@pytest.mark.parametrize("missing", AVX2)
def test_without_one_of_avx2_there_is_no_avx512_either(missing: str) -> None:
    assert kernels.best_tier(f for f in (*AVX2, *AVX512) if f != missing) == "scalar"


def test_features_are_the_systems() -> None:
    """The compiler's CPUID code against the kernel's /proc/cpuinfo."""
    missing = missing_cpu_features(f.name for f in kernels.cpu_features())
    assert {f.name for f in kernels.cpu_features() if not f.present} == set(missing)


def in_process(code: str, cpu: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"SPIKE_CPU": cpu}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("asked", ["", *TIERS])
def test_spike_cpu_lowers_the_tier(asked: str) -> None:
    best = kernels.best_tier(f.name for f in kernels.cpu_features() if f.present)
    done = in_process("from spikeinfer import kernels; print(kernels.cpu_tier())", asked)
    # bf16 products round more than float32: only who asks for them gets them
    assert done.stdout.strip() == min(asked or "avx512", best, key=TIERS.index), done.stderr


BAD = """
from spikeinfer import SpikeError, kernels
from spikeinfer.cli import app
from spikeinfer.console.guard import run
import typer
try:
    kernels.ops_library()
except SpikeError as error:
    print(error)
code = run(typer.main.get_command(app), "spike", ["doctor"])
print("doctor ends with", code)
"""


def test_a_wrong_spike_cpu_is_one_clear_error() -> None:
    done = in_process(BAD, "avx3")
    said = (
        "SPK801 kernels: the environment variable SPIKE_CPU is 'avx3', not scalar, avx2, avx512 or"
    )
    assert done.stdout.startswith(said), done.stderr
    assert "unset it" in done.stdout
    assert "FAILED: SpikeError: SPK801" in done.stdout
    assert done.stdout.endswith("doctor ends with 5\n")
