"""What a build is asked to do: every flag of `spike-build`, typed, with its default.

Importing this needs none of the build extra, so that the command line can check its arguments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from ...errors import ExitCode, SpikeError
from ..engine.cache import GROUP_TOKENS
from ..quantize import Quantization
from .overrides import Override

HALVES = ("float16", "bfloat16")
DTYPES = ("auto", "float32", *HALVES)
KV_DTYPES = ("auto", "f32", "f16", "bf16", "int8", "int4")
SIZES = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 1 << 10, "mib": 1 << 20,
         "gib": 1 << 30}  # fmt: skip
KV_TYPES = ("auto", "paged", "continuous")
QUANTIZERS = ("auto", "plain", "feedback")
BACKENDS = ("onnxruntime", "tensorrt")
PATHS = ("model", "output_dir", "dump_ir", "golden", "calibration", "imatrix", "timing_cache")
TENSORRT_FORMATS = ("int4_sym", "f16", "bf16", "f32")
"""Storage formats that a TensorRT engine holds."""
LONGEST_DEFAULT = 8192
"""Default bound on max_seq_len, however long the model's own limit is."""


@dataclass(frozen=True)
class BuildRequest:
    """One build.

    Args:
        model: checkpoint directory, or a GGUF file.
        output_dir: engine directory to publish.
        model_type: the checkpoint's type if config.json does not state it.
        dtype: storage of unquantised matrices; ``auto`` is the checkpoint's. ``float16`` and
            ``bfloat16`` also round every value to it for which that is safe (assign-precision).
        quantization: ``q4_k_m`` and so on; ``none`` keeps matrices in `dtype`, and those of a
            source that is quantised already in their own formats.
        quantizer: ``plain``, matrix by matrix; ``feedback`` reads calibration text and lets later
            columns make up for the errors of earlier ones (GPTQ); ``auto`` is feedback if
            `calibration` is given, else plain.
        enable_streaming: flat tokens over a paged cache, instead of batch, sequence and past.
        max_num_tokens: tokens of one step.
        max_batch_size: sequences of one step.
        max_seq_len: tokens of one sequence; the model's own limit, at most 8192, if None.
        kv_cache_type: ``paged`` with streaming, ``continuous`` without.
        kv_cache_dtype: f32, f16, int8 or int4; ``auto`` is f32 for an all-float32 engine, else f16.
        tokens_per_block: size of a block of the paged cache.
        workers: threads of the quantiser; 0 for one per CPU.
        golden: ``auto``, ``off``, or a golden set's file.
        thresholds: limits of the golden gate that replace the format's own.
        calibration: text file on which values are observed for ``dtype``, and to whose inputs
            matrices are quantised; None is our own text.
        imatrix: file of importances (`spike calibrate`) that weigh the quantiser's errors.
        without: passes to leave out.
        pass_options: options by pass name.
        max_kl: choose formats for the smallest engine whose mean KL on held-out text, in nats, is
            at most this.
        max_bpw: choose formats for the least KL with at most so many bits per weight.
        max_size: the same under a size of rank0.weights, such as ``90MB`` or ``1.5GiB``.
        formats: storage formats settled by name, role or layer; the first that holds wins.
        backend: ``onnxruntime``, or ``tensorrt``, whose `dtype` ``auto`` is float16.
        target_sm: GPU architectures of a TensorRT engine, such as ``sm89,sm120``, or ``current``.
        plan_only: write a TensorRT network's plan instead of an engine.
        weight_streaming: a TensorRT engine's weights may stay in the machine's memory.
        timing_cache: refused; TensorRT for RTX has no use for one.
        dry_run: stop before any weight is read and say what would be built.
        verify_passes: run the reference interpreter before and after each pass.
        dump_ir: directory for one IR file per phase.
        keep_failed: keep an engine that failed, beside the output.
    """

    model: Path
    output_dir: Path
    model_type: str | None = None
    dtype: str = "auto"
    quantization: str = "none"
    quantizer: str = "auto"
    enable_streaming: bool = False
    max_num_tokens: int = 512
    max_batch_size: int = 8
    max_seq_len: int | None = None
    kv_cache_type: str = "auto"
    kv_cache_dtype: str = "auto"
    tokens_per_block: int = 32
    workers: int = 0
    backend: str = "onnxruntime"
    target_sm: str | None = None
    plan_only: bool = False
    weight_streaming: bool = False
    timing_cache: Path | None = None
    golden: str = "auto"
    thresholds: Mapping[str, float] = field(default_factory=dict)
    calibration: Path | None = None
    imatrix: Path | None = None
    without: tuple[str, ...] = ()
    pass_options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    formats: tuple[Override, ...] = ()
    max_kl: float | None = None
    max_bpw: float | None = None
    max_size: str | None = None
    dry_run: bool = False
    verify_passes: bool = False
    dump_ir: Path | None = None
    keep_failed: bool = False

    def __post_init__(self) -> None:
        """Raises SpikeError SPK801 for a value out of range, SPK430, SPK560, SPK821, and as
        `Quantization.parse`."""
        object.__setattr__(self, "model", Path(self.model))
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv-cache-dtype", self.kv_cache_dtype, KV_DTYPES)
        _one_of("kv-cache-type", self.kv_cache_type, KV_TYPES)
        _one_of("backend", self.backend, BACKENDS)
        _one_of("quantizer", self.quantizer, QUANTIZERS)
        for name in ("max_num_tokens", "max_batch_size", "max_seq_len", "tokens_per_block"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise _bad(name.replace("_", "-"), value, "a number of at least 1")
        if self.workers < 0:
            raise _bad("workers", self.workers, "0 (one per CPU) or more")
        if self.backend == "tensorrt":
            self._check_tensorrt()
        else:
            self._check_no_tensorrt()
        if not self.wants_fp8:
            self.require_quantization()
        self._check_cache()
        self._check_budget()
        self._check_calibration()

    def require_quantization(self) -> None:
        """Raises as `Quantization.parse`; `auto` is the checkpoint's, and always valid."""
        Quantization.parse(self.quantization)

    @property
    def wants_fp8(self) -> bool:
        """Whether a TensorRT build asks for fp8, which the target has to have before all else."""
        return self.backend == "tensorrt" and self.quantization.lower().startswith("fp8")

    @property
    def half(self) -> str:
        """The 16-bit type that a TensorRT engine computes in and keeps caches in."""
        return "f16" if self.dtype == "float16" else "bf16"

    @property
    def budgeted(self) -> bool:
        """Whether formats are chosen by a quality budget, instead of by `quantization`."""
        return any(v is not None for v in (self.max_kl, self.max_bpw, self.max_size))

    @property
    def size_limit(self) -> int | None:
        """`max_size` in bytes."""
        if self.max_size is None:
            return None
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?i?b)?\s*", self.max_size.lower())
        limit = int(float(found[1]) * SIZES.get(found[2] or "", 0)) if found else 0
        if limit < 1:
            raise _bad("max-size", self.max_size, "a size such as 90MB or 1.5GiB")
        return limit

    def _check_tensorrt(self) -> None:
        """Raises SPK560 for what TensorRT engines don't have, SPK821 for a contradiction."""
        if self.dtype == "auto":
            object.__setattr__(self, "dtype", "float16")
        if self.dtype not in HALVES:
            raise _no_tensorrt(f"computes in half precision, not {self.dtype}",
                               "Use --dtype float16 or bfloat16.")  # fmt: skip
        half = self.half
        if self.kv_cache_dtype not in ("auto", half):
            raise _no_tensorrt(f"has caches of its own element type, {half}",
                               "Leave --kv-cache-dtype out.")  # fmt: skip
        if self.enable_streaming:
            raise _contradiction(
                "--enable-streaming asks for a paged cache, and a TensorRT engine has a linear one",
                "Leave it out: chunked prompts and caches written in place come with the backend.",
            )
        key = self.quantization.lower()
        known = ("none", "auto", "", *TENSORRT_FORMATS, "fp16", "float16", "bfloat16")
        if not self.wants_fp8 and key not in known and key in list(Quantization):
            raise _no_tensorrt(
                f"has no {key}: its int4 is symmetric, with one scale above zero per 32 values",
                "Use --quantization int4_sym, which is as small, or none. A quantised source is "
                "quantised again by it, and the report and the golden gate say what that loses.",
            )
        for override in self.formats:
            if override.format not in TENSORRT_FORMATS:
                raise _no_tensorrt(f"has no {override.format}, which a recipe's override asks for",
                                   f"Use one of {', '.join(TENSORRT_FORMATS)}.")  # fmt: skip

    def _check_no_tensorrt(self) -> None:
        """Raises SPK821 for options that only a TensorRT build reads."""
        for name in ("target_sm", "plan_only", "weight_streaming", "timing_cache"):
            if getattr(self, name):
                raise _contradiction(
                    f"--{name.replace('_', '-')} is for --backend tensorrt",
                    "Add --backend tensorrt, or leave it out.",
                )
        if self.kv_cache_dtype == "bf16":
            raise _bad("kv-cache-dtype", "bf16", "f32, f16, int8 or int4 with this backend")

    def _check_budget(self) -> None:
        if self.max_kl is not None and not 0 < self.max_kl < math.inf:
            raise _bad("max-kl", self.max_kl, "a number of nats above 0")
        if self.max_bpw is not None and not 0 < self.max_bpw <= 32:
            raise _bad("max-bpw", self.max_bpw, "a number of bits above 0, at most 32")
        if not self.budgeted:
            return
        limited = self.size_limit is not None
        if limited and self.max_bpw is not None:
            raise _contradiction("--max-size and --max-bpw limit the same", "Give one of them.")
        if self.golden == "off":
            raise _contradiction(
                "a quality budget is measured by the golden gate, which is off",
                "Leave --golden off out.",
            )
        if self.quantization.lower() not in ("none", "auto", ""):
            raise _contradiction(
                f"--quantization {self.quantization} is a fixed mix, and a budget chooses formats",
                "Give one of them; to settle some matrices, use `formats` in a recipe.",
            )
        if self.imatrix is not None:
            raise _contradiction(
                "a quality budget measures importances itself, and --imatrix gives others",
                "Leave --imatrix out; --calibration TEXT says on what to measure.",
            )
        if self.dry_run:
            raise _contradiction(
                "a quality budget needs the weights, which --dry-run doesn't read",
                "Leave --dry-run out.",
            )

    @property
    def resolved_quantizer(self) -> str:
        """``plain`` or ``feedback``. Text for half precision or a budget doesn't ask for
        feedback as well."""
        if self.quantizer != "auto":
            return self.quantizer
        asked = self.calibration is not None and self.dtype not in HALVES and not self.budgeted
        return "feedback" if asked else "plain"

    def _check_cache(self) -> None:
        only = "paged" if self.enable_streaming else "continuous"
        if self.kv_cache_type not in ("auto", only):
            wanted = "with" if self.kv_cache_type == "paged" else "without"
            raise _bad("kv-cache-type", self.kv_cache_type, f"used {wanted} --enable-streaming")
        if self.backend == "tensorrt":
            return
        if not self.enable_streaming and self.kv_cache_dtype not in ("auto", "f32"):
            raise _bad("kv-cache-dtype", self.kv_cache_dtype, "used with --enable-streaming")
        if self.kv_cache_dtype == "int4" and self.tokens_per_block % GROUP_TOKENS:
            raise SpikeError(
                "SPK430",
                "command line",
                f"--tokens-per-block is {self.tokens_per_block}; an int4 cache codes keys in "
                f"groups of {GROUP_TOKENS} tokens, and no group may lie in two blocks.",
                f"Use {GROUP_TOKENS} or a multiple of it, or --kv-cache-dtype int8.",
                ExitCode.USAGE,
            )

    def _check_calibration(self) -> None:
        """Raises SPK818 for a text that nothing would read."""
        read = self.dtype in HALVES or self.budgeted or self.resolved_quantizer == "feedback"
        if self.calibration is not None and not read:
            raise SpikeError(
                "SPK818",
                "command line",
                f"--calibration has no use with --quantizer plain and --dtype {self.dtype}: text "
                "is read to quantise to typical inputs, and to decide which values may be rounded "
                "to half precision.",
                "Leave it out, or give another --quantizer, --dtype float16 or bfloat16, or a "
                "quality budget such as --max-kl.",
                ExitCode.USAGE,
            )

    def options(self) -> dict[str, object]:
        """Every option but paths, as the manifest keeps them; the golden file by its name."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in PATHS}
        kept["golden"] = Path(self.golden).name
        kept["calibration"] = Path(self.calibration).name if self.calibration else "own text"
        if self.imatrix:
            kept["imatrix"] = Path(self.imatrix).name
        kept["without"] = list(self.without)
        kept["formats"] = [override.to_json() for override in self.formats]
        for view_only in ("dry_run", "keep_failed", "workers", "verify_passes", "plan_only"):
            del kept[view_only]
        return kept


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _bad(flag, value, f"one of {', '.join(allowed)}")


def _no_tensorrt(what: str, remedy: str) -> SpikeError:
    return SpikeError(
        "SPK560", "command line", f"a TensorRT engine {what}.", remedy, ExitCode.UNSUPPORTED
    )


def _contradiction(what: str, remedy: str) -> SpikeError:
    return SpikeError("SPK821", "command line", f"{what}.", remedy, ExitCode.USAGE)


def _bad(flag: str, value: object, wanted: str) -> SpikeError:
    return SpikeError(
        "SPK801",
        "command line",
        f"--{flag} is {value!r}.",
        f"It must be {wanted}.",
        ExitCode.USAGE,
    )
