"""`--backend tensorrt` on the command line: what is refused before any work, and in which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from spikeinfer import SpikeError
from spikeinfer.compiler.assembly.overrides import Override
from spikeinfer.compiler.assembly.request import BuildRequest


def request(**options: Any) -> BuildRequest:
    return BuildRequest(Path("model"), Path("out"), backend="tensorrt", **options)


def test_half_precision_by_default() -> None:
    assert request(target_sm="sm89").dtype == "float16"
    assert request(target_sm="sm89", dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"dtype": "float32"}, "SPK560", "half precision, not float32"),
        ({"quantization": "q4_k_m"}, "SPK560", "no q4_k_m: its int4 is symmetric"),
        ({"quantization": "q4_0"}, "SPK560", "above zero per 32 values"),
        ({"kv_cache_dtype": "int8"}, "SPK560", "own element type, f16"),
        ({"kv_cache_dtype": "f16", "dtype": "bfloat16"}, "SPK560", "own element type, bf16"),
        ({"formats": (Override("q6_k", role="ffn_down"),)}, "SPK560", "no q6_k"),
        ({"enable_streaming": True}, "SPK821", "a TensorRT engine has a linear one"),
        ({"quantization": "int4_awq"}, "SPK402", "not in this version"),
        ({"quantization": "q4_sym"}, "SPK401", "Did you mean int4_sym"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_tensorrt_engine_does_not_have(
    options: dict[str, Any], code: str, words: str
) -> None:
    with pytest.raises(SpikeError) as refused:
        request(target_sm="sm89", **options)
    assert refused.value.code == code
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [("target_sm", "sm89"), ("plan_only", True), ("weight_streaming", True),
     ("timing_cache", Path("cache"))],
)  # fmt: skip
def test_its_options_belong_to_it(option: str, value: object) -> None:
    flag = option.replace("_", "-")
    with pytest.raises(SpikeError, match=f"--{flag} is for --backend tensorrt") as refused:
        BuildRequest(Path("model"), Path("out"), **{option: value})  # type: ignore[arg-type]
    assert refused.value.code == "SPK821"


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({}, "SPK520", "no architecture is named"),
        ({"target_sm": "sm90"}, "SPK520", "Hopper"),
        ({"target_sm": "sm89,sm98"}, "SPK520", "Did you mean sm89"),
        ({"target_sm": "current"}, "SPK521", "there is none"),
        ({"target_sm": "sm75", "quantization": "int4_sym"}, "SPK522", "int4"),
        ({"target_sm": "sm75,sm89", "max_kl": 0.1}, "SPK522", "int4"),
        ({"target_sm": "sm75", "dtype": "bfloat16"}, "SPK522", "bf16"),
        ({"target_sm": "sm80", "quantization": "fp8"}, "SPK522", "fp8"),
        ({"target_sm": "sm86,sm89", "quantization": "fp8"}, "SPK522", "sm86"),
        ({"target_sm": "sm89", "quantization": "fp8"}, "SPK402", "not in this version"),
        ({"target_sm": "sm89", "timing_cache": Path("c")}, "SPK530", "has no effect"),
        ({"target_sm": "sm89", "max_seq_len": 0}, "SPK801", "max-seq-len"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_targets_are_refused_before_the_checkpoint_is_opened(
    options: dict[str, Any], code: str, words: str
) -> None:
    """The model's path holds nothing, and nobody gets as far as looking."""
    from spikeinfer.driver import build

    with pytest.raises(SpikeError) as refused:
        build(request(**options))
    assert refused.value.code == code
    assert words in str(refused.value)


def test_without_the_package_only_a_plan_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """SPK527 says what to install; --plan-only goes on to the checkpoint, which isn't there."""
    from importlib import metadata

    from spikeinfer.driver import build

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(SpikeError, match=r"pip install 'spikeinfer\[tensorrt\]'") as refused:
        build(request(target_sm="sm89"))
    assert refused.value.code == "SPK527"
    with pytest.raises(SpikeError) as refused:
        build(request(target_sm="sm89", plan_only=True))
    assert refused.value.code == "SPK101"
