"""Serialized TensorRT engines from a machine without a GPU, by TensorRT's own builder."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from spikeinfer.compiler.backends.tensorrt import build as builder
from spikeinfer.compiler.backends.tensorrt import build_engine, plan_network
from spikeinfer.errors import ExitCode, SpikeError

pytest.importorskip("tensorrt_rtx")

SUPPORT = Path(__file__).parents[1] / "numeric" / "tensorrt"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SUPPORT / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tiny = _load("tiny_model")


def built(target: Any, **options: Any) -> Any:
    graph = tiny.graph(**options)
    plan = plan_network(graph, target)
    return build_engine(graph, plan, tiny.constants(graph), target)


@pytest.mark.parametrize("int4", [False, True], ids=["f16", "int4"])
def test_an_engine_is_serialized_for_several_architectures(int4: bool) -> None:
    engine = built(replace(tiny.TARGET, sms=("sm86", "sm89", "sm120")), int4=int4)
    assert engine.data[:4] == b"vtrt"
    assert len(engine.data) > 100_000
    assert engine.version == builder.installed_version()
    assert not any("rror" in message for message in engine.warnings)


def test_spelt_out_attention_and_streamed_weights_build() -> None:
    engine = built(replace(tiny.TARGET, weight_streaming=True), attn=(", softcap=5.0", ""))
    assert len(engine.data) > 100_000


def test_a_network_that_differs_is_never_serialized() -> None:
    graph = tiny.graph()
    plan = plan_network(graph, tiny.TARGET)
    wrong = replace(plan.constants["@up1"], source="up0")
    scales = replace(plan.constants["@up1.scales"], source="up0")
    plan = replace(plan, constants={**plan.constants, "@up1": wrong, "@up1.scales": scales})
    with pytest.raises(SpikeError, match=r"SPK529 .*@up1.*SHA-256") as raised:
        build_engine(graph, plan, tiny.constants(graph), tiny.TARGET)
    assert raised.value.exit_code is ExitCode.INTERNAL
