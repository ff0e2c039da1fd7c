"""What an engine is built for: GPUs, element type, sizes; and what TensorRT refuses, before work.

TensorRT for RTX compiles for several architectures without a GPU. What it can't do it says after
minutes, in its own words, or by a crash; `Target.check` says it at once.
"""

from __future__ import annotations

import ctypes
import difflib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from ....errors import ExitCode, SpikeError
from ...ir import HALVES, DType

SMS = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")
CURRENT = "current"
UNBUILT = {"sm70": "Volta", "sm87": "Orin", "sm90": "Hopper", "sm100": "data-centre Blackwell"}
"""Architectures that people ask for and that this TensorRT has no code for."""

TYPE_NEEDS = {
    "int4": ("sm80", "sm86", "sm89", "sm120", "sm121"),
    "bf16": ("sm80", "sm86", "sm89", "sm120", "sm121"),
    "fp8": ("sm89", "sm120", "sm121"),
    "fp4": ("sm120", "sm121"),
}
"""Architectures that have an element type in hardware; f16 and f32 are everywhere."""

LOGIT_BYTES = 64 << 20
"""Most memory of one step's logits."""

NEEDS_GPU = ("refit", "strip-plan", "version-compatible")
"""Builder options that fail inside TensorRT where there is no GPU or no lean runtime."""


@dataclass(frozen=True)
class Profile:
    """Sizes that one execution context is tuned for: least, typical and most of each.

    Args:
        name: ``prefill`` or ``decode``.
        batches: sequences in a step (B).
        steps: tokens of each sequence (S).
        rows: tokens of each sequence whose logits are computed (R).
    """

    name: str
    batches: tuple[int, int, int]
    steps: tuple[int, int, int]
    rows: tuple[int, int, int]

    def size(self, dim: str, which: int) -> int:
        """The least (0), typical (1) or largest (2) size of a dimension: B, S or R."""
        return {"B": self.batches, "S": self.steps, "R": self.rows}[dim][which]


@dataclass(frozen=True)
class Target:
    """What an engine is built for.

    Args:
        sms: architectures, such as ``("sm89", "sm120")``; ``("current",)`` is the GPU here.
        dtype: element type of activations, KV cache and weights that aren't quantised: f16 or bf16.
        capacity: tokens that the KV cache of one sequence holds (--max-seq-len).
        max_batch_size: sequences in one step.
        max_num_tokens: tokens of one sequence in one prefill step (a chunk).
        weight_streaming: weights may stay in host memory at run time.
        timing_cache: refused; see `_check_options`.
        options: builder options by name, such as ``refit``; all that exist need a GPU.
    """

    sms: tuple[str, ...]
    dtype: DType = DType.F16
    capacity: int = 2048
    max_batch_size: int = 8
    max_num_tokens: int = 512
    weight_streaming: bool = False
    timing_cache: Path | None = None
    options: tuple[str, ...] = ()

    def profiles(self, vocabulary: int) -> tuple[Profile, Profile]:
        """Prefill: a chunk of one sequence, with as many rows of logits as take `LOGIT_BYTES`.
        Decode: a token of each sequence."""
        chunk, one = self.max_num_tokens, (1, 1, 1)
        rows = min(chunk, max(1, LOGIT_BYTES // (4 * vocabulary)))
        batches = (1, self.max_batch_size, self.max_batch_size)
        return (
            Profile("prefill", one, (1, chunk, chunk), (1, 1, rows)),
            Profile("decode", batches, one, one),
        )

    def check(self, types: Collection[str] = ()) -> None:
        """Refuses what can't be built, before any work.

        Args:
            types: element types of the weights besides `dtype`, such as ``int4`` or ``fp8``.

        Raises SpikeError: SPK520 unknown or missing architecture, SPK521 `current` without a GPU,
        SPK522 a type that an architecture lacks, SPK523 an option that needs a GPU, SPK524 sizes
        that contradict each other, SPK530 a timing cache.
        """
        _check_sms(self.sms)
        if self.dtype not in HALVES:
            what = f"{self.dtype.value} isn't a type that engines are computed in."
            raise _refused("SPK522", what, "Give --dtype float16 or bfloat16.")
        _check_types(self.sms, (self.dtype.value, *types))
        _check_options(self.options, self.timing_cache)
        _check_sizes(self)


def have_gpu() -> bool:
    """Whether the driver finds a GPU here."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return count.value > 0


def _refused(code: str, what: str, remedy: str) -> SpikeError:
    return SpikeError(code, "TensorRT target", what, remedy, ExitCode.UNSUPPORTED)


def _check_sms(sms: tuple[str, ...]) -> None:
    known = f"This TensorRT builds for {', '.join(SMS)}."
    if not sms:
        raise _refused("SPK520", "no architecture is named.", f"Give --target-sm. {known}")
    if CURRENT in sms:
        if len(sms) > 1:
            what = "`current` stands beside other architectures."
            raise _refused("SPK521", what, "Name them all, or give `current` alone.")
        if not have_gpu():
            what = "`current` means the GPU of this machine, and there is none."
            raise _refused("SPK521", what, f"Name the architecture. {known}")
        return
    for sm in sms:
        if sm in SMS:
            continue
        name = UNBUILT.get(sm)
        if name:
            what = (
                f"{sm} ({name}) isn't among the architectures that TensorRT for RTX compiles for."
            )
            raise _refused("SPK520", what, known)
        near = difflib.get_close_matches(sm, SMS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise _refused("SPK520", f"there is no architecture {sm!r}.", hint + known)
    if len(set(sms)) < len(sms):
        raise _refused("SPK520", f"{', '.join(sms)} names one twice.", "Name each once.")


def _check_types(sms: tuple[str, ...], types: Collection[str]) -> None:
    for kind in types:
        lacking = [sm for sm in sms if sm in SMS and sm not in TYPE_NEEDS.get(kind, SMS)]
        if lacking:
            raise _refused(
                "SPK522",
                f"{kind} isn't a type that {', '.join(lacking)} computes with.",
                f"Leave {', '.join(lacking)} out, or choose another type; {kind} needs "
                f"{', '.join(TYPE_NEEDS[kind])}.",
            )


def _check_options(options: Collection[str], timing_cache: Path | None) -> None:
    """TensorRT for RTX compiles its kernels where they run: there is nothing to time before."""
    if timing_cache is not None:
        raise _refused(
            "SPK530",
            "TensorRT for RTX times no kernels when it builds, so a timing cache has no effect.",
            "Leave --timing-cache out: kernels are compiled where the engine runs.",
        )
    for option in options:
        if option not in NEEDS_GPU:
            what = f"there is no builder option {option!r}."
            raise _refused("SPK523", what, f"Known: {', '.join(NEEDS_GPU)}.")
        if not have_gpu():
            raise _refused(
                "SPK523",
                f"the option {option} makes TensorRT fail where there is no GPU.",
                "Build without it, or on a machine with a GPU.",
            )


def _check_sizes(target: Target) -> None:
    sizes = {
        "--max-seq-len": target.capacity,
        "--max-batch-size": target.max_batch_size,
        "--max-num-tokens": target.max_num_tokens,
    }
    for flag, size in sizes.items():
        if size < 1:
            raise _refused("SPK524", f"{flag} is {size}.", "It must be 1 or more.")
    if target.max_num_tokens > target.capacity:
        raise _refused(
            "SPK524",
            f"a prefill step of {target.max_num_tokens} tokens doesn't fit into a cache of "
            f"{target.capacity}.",
            "Lower --max-num-tokens or raise --max-seq-len.",
        )
