"""What can't be built for TensorRT is refused at once, by code, with what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from spikeinfer.compiler.backends.tensorrt import Profile, Target
from spikeinfer.compiler.backends.tensorrt import build as builder
from spikeinfer.compiler.backends.tensorrt import target as targets
from spikeinfer.compiler.ir import DType
from spikeinfer.errors import ExitCode, SpikeError

REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "none named": ({"sms": ()}, (), r"SPK520 .*--target-sm.*sm75, sm80"),
    "Hopper": ({"sms": ("sm90",)}, (), r"SPK520 .*sm90 \(Hopper\).*sm120"),
    "data-centre Blackwell": ({"sms": ("sm89", "sm100")}, (), r"SPK520 .*sm100"),
    "unknown": ({"sms": ("sm98",)}, (), r"SPK520 .*'sm98'.*Did you mean sm89"),
    "named twice": ({"sms": ("sm89", "sm89")}, (), "SPK520 .*twice"),
    "this machine's GPU": ({"sms": ("current",)}, (), "SPK521 .*there is none.*sm89"),
    "current and another": ({"sms": ("current", "sm89")}, (), "SPK521 .*beside other"),
    "int4 on Turing": ({"sms": ("sm75", "sm89")}, ("int4",), "SPK522 .*int4 .*sm75.*sm80, sm86"),
    "bf16 on Turing": ({"sms": ("sm75",), "dtype": DType.BF16}, (), "SPK522 .*bf16 .*sm75"),
    "fp8 on Ampere": ({"sms": ("sm80", "sm86")}, ("fp8",), "SPK522 .*fp8 .*sm80, sm86.*sm89"),
    "fp4 on Ada": ({"sms": ("sm89",)}, ("fp4",), "SPK522 .*fp4 .*sm89.*sm120"),
    "refit": ({"options": ("refit",)}, (), "SPK523 .*refit .*no GPU"),
    "stripped": ({"options": ("strip-plan",)}, (), "SPK523 .*strip-plan"),
    "version compatible": ({"options": ("version-compatible",)}, (), "SPK523 .*version-comp"),
    "unknown option": ({"options": ("fast",)}, (), "SPK523 .*'fast'.*refit"),
    "timing cache": ({"timing_cache": Path("t")}, (), "SPK530 .*no effect.*--timing-cache out"),
    "no sequences": ({"max_batch_size": 0}, (), "SPK524 .*--max-batch-size is 0"),
    "chunk over capacity": ({"capacity": 64, "max_num_tokens": 65}, (), "SPK524 .*65 .*64"),
    "element type": ({"dtype": DType.F32}, (), "SPK522 .*f32 .*float16 or bfloat16"),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "have_gpu", lambda: False)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_built_is_refused_before_work(name: str) -> None:
    changes, types, message = REFUSED[name]
    with pytest.raises(SpikeError, match=message) as raised:
        Target(**{"sms": ("sm89",), **changes}).check(types)
    assert raised.value.exit_code is ExitCode.UNSUPPORTED


def test_what_can_be_built_passes() -> None:
    Target(("sm86", "sm89", "sm120")).check(("int4",))
    Target(("sm89", "sm120"), DType.BF16).check(("fp8",))
    Target(("sm75",)).check()


def test_with_a_gpu_current_and_refit_are_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "have_gpu", lambda: True)
    Target(("current",), options=("refit",)).check(("int4",))


def test_profiles_are_one_per_phase() -> None:
    prefill, decode = Target(("sm89",), max_batch_size=4, max_num_tokens=256).profiles(1 << 20)
    assert prefill == Profile("prefill", (1, 1, 1), (1, 256, 256), (1, 1, 16))
    assert decode == Profile("decode", (1, 4, 4), (1, 1, 1), (1, 1, 1))


def test_without_the_package_a_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> str:
        raise builder.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(builder.metadata, "version", missing)
    with pytest.raises(SpikeError, match=r"SPK527 .*spikeinfer\[tensorrt\].*--plan-only"):
        builder.installed_version()


def test_planning_imports_no_tensorrt() -> None:
    code = "import sys, spikeinfer.compiler.backends.tensorrt; print('tensorrt_rtx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
