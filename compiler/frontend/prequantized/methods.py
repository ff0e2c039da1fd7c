"""Which quantisation methods are taken, and which are refused: decided by config.json alone.

Refusals come before a tensor is read and say what to do with that very method.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ....errors import SpikeError
from ..json_file import read_json_object
from .awq import Awq
from .compressed import CompressedTensors
from .fp8 import Fp8
from .gptq import Gptq, conv1d_modules
from .packed import Scheme
from .settings import Settings

CONFIG = "config.json"
KEYS = ("quantization_config", "compression_config")
TAKEN = "GPTQ, AWQ (GEMM), FP8 and compressed-tensors"

# Files of quantisers that came before `quantization_config`, and the method each stands for.
OLD_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
MODELOPT_FILE = "hf_quant_config.json"

ORIGINAL = "Build from the original bf16, f16 or f32 checkpoint and choose --quantization there."
UNPACK = (
    "Load it with transformers and {how}, save_pretrained the result and build from that; better, "
    "build from the original checkpoint and choose --quantization there."
)
REMEDIES = {
    "bitsandbytes": UNPACK.format(how="call `model.dequantize()`"),
    "mxfp4": UNPACK.format(how="`Mxfp4Config(dequantize=True)`"),
    "hqq": UNPACK.format(how="call `model.dequantize()`"),
    "torchao": UNPACK.format(how="call `model.dequantize()`"),
    "auto-round": "Export it again as `auto_gptq`, `auto_awq` or `llm_compressor`, or build from "
    "the original checkpoint.",
    "gguf": "Give the .gguf file itself as --model.",
}  # fmt: skip
"""What to do about a method, where there is more to say than `ORIGINAL`."""

AWQ_VERSIONS = ("gemm",)
GPTQ_VERSIONS = ("gptq", "gptq_v2")
COMPRESSED_FORMATS = ("dense", "pack-quantized", "int-quantized", "float-quantized",
                      "naive-quantized", "mixed-precision")  # fmt: skip


def read_scheme(
    directory: Path, raw: Mapping[str, Any], model: torch.nn.Module | None = None
) -> Scheme | None:
    """How the weights in `directory` are quantised; None if config.json says nothing of it.

    Args:
        raw: config.json.
        model: the model on the meta device, to know layers that keep inputs first; may be left
            out to decide about a refusal only.

    Raises: SPK120 for a method or a variant that isn't taken, SPK140 for bad settings.
    """
    found = _settings(directory, raw)
    if found is None:
        return None
    method, settings = found
    if method == "gptq":
        _require_plain_gptq(settings)
        return Gptq(settings, conv1d_modules(model) if model is not None else ())
    if method == "awq":
        _require_gemm(settings)
        return Awq(settings)
    if method in ("fp8", "mxfp8", "fbgemm_fp8"):
        _require_float8(settings)
        return Fp8(settings, method)
    if method in ("compressed-tensors", "compressed_tensors"):
        _require_known_formats(settings)
        return CompressedTensors(settings)
    raise quantised_source(directory, f"{method}, {settings.origin}", REMEDIES.get(method))


def quantised_source(directory: Path, evidence: str, remedy: str | None = None) -> SpikeError:
    """SPK120 for weights that were quantised in a way that isn't taken."""
    return SpikeError(
        "SPK120",
        "checkpoint",
        f"the weights in {directory} are already quantised ({evidence}), and not in a way that is "
        f"taken in this version ({TAKEN} are).",
        remedy or ORIGINAL,
    )


def _settings(directory: Path, raw: Mapping[str, Any]) -> tuple[str, Settings] | None:
    """(method, its settings) of config.json, or of a file of an older tool."""
    text = raw.get("text_config")
    for config in (raw, text if isinstance(text, dict) else {}):
        for key in KEYS:
            values = config.get(key)
            if not values:
                continue
            origin = f"`{key}` in {CONFIG}"
            if not isinstance(values, dict):
                raise quantised_source(directory, f"see {origin}")
            return _method(values), Settings(directory, origin, values)
    if (directory / MODELOPT_FILE).exists():
        raise quantised_source(directory, f"modelopt, {MODELOPT_FILE}")
    for name, method in OLD_FILES.items():
        if (directory / name).exists():
            values = read_json_object(directory / name, "SPK140")
            stated = str(values.get("quant_method") or method).lower()
            return stated, Settings(directory, name, values)
    return None


def _method(values: Mapping[str, Any]) -> str:
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes"
    stated = values.get("quant_method")
    if stated is None and "config_groups" in values:
        return "compressed-tensors"
    return str(stated).lower() if stated else "unknown method"


def _require_plain_gptq(settings: Settings) -> None:
    """Layouts and extras of GPTQModel that other files don't have."""
    version = settings.word("checkpoint_format", "format", default="gptq")
    if version not in GPTQ_VERSIONS or settings.get("is_marlin_format"):
        raise _variant(settings, "GPTQ", version if version not in GPTQ_VERSIONS else "marlin")
    for extra in ("rotation", "adapter", "lm_head_low_gpu_mem_usage_format"):
        if settings.get(extra):
            raise _variant(settings, "GPTQ", f"with {extra}")
    if settings.word("pack_dtype", default="int32") != "int32":
        raise _variant(settings, "GPTQ", f"packed in {settings.get('pack_dtype')}")
    dynamic = settings.get("dynamic")
    if isinstance(dynamic, dict) and not all(str(rule).startswith("-:") for rule in dynamic):
        raise _variant(settings, "GPTQ", "with settings per module (`dynamic`)")


def _require_gemm(settings: Settings) -> None:
    version = settings.word("version", "format", "checkpoint_format", default="gemm")
    if settings.word("backend", default="autoawq") == "llm-awq":
        version = "llm-awq"
    if version not in AWQ_VERSIONS:
        raise _variant(settings, "AWQ", version)


def _require_float8(settings: Settings) -> None:
    if settings.word("fmt", default="e4m3") not in ("e4m3", "e5m2", "float8_e4m3fn"):
        raise _variant(settings, "FP8", str(settings.get("fmt")))
    if settings.word("expert_dtype", default="fp8") != "fp8":
        raise _variant(settings, "FP8", f"with {settings.get('expert_dtype')} experts")


def _require_known_formats(settings: Settings) -> None:
    groups = settings.get("config_groups")
    entries = list(groups.values()) if isinstance(groups, dict) else []
    forms = [settings.get("format"), *(e.get("format") for e in entries if isinstance(e, dict))]
    for form in forms:
        if form is not None and form not in COMPRESSED_FORMATS:
            raise _variant(settings, "compressed-tensors", str(form))
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format", "dense") != "dense":
        raise _variant(settings, "compressed-tensors", f"with {sparsity['format']} sparsity")
    transforms = settings.get("transform_config")
    if isinstance(transforms, dict) and transforms.get("config_groups"):
        raise _variant(settings, "compressed-tensors", "with transforms of its activations")


def _variant(settings: Settings, method: str, variant: str) -> SpikeError:
    return quantised_source(settings.directory, f"{method} {variant}, {settings.origin}")
