"""The structural checker: nothing on a true network, and every planted emission fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from spikeinfer.compiler.backends.tensorrt import Finding, NetworkPlan, check_network, plan_network
from spikeinfer.compiler.ir import Graph

from .faults import PLANNED, STORED
from .tiny_model import TARGET, constants, graph

trt = pytest.importorskip("tensorrt_rtx")


@cache
def model() -> tuple[Graph, NetworkPlan]:
    tiny = graph()
    return tiny, plan_network(tiny, TARGET)


@pytest.fixture
def findings() -> Iterator[Callable[..., list[Finding]]]:
    """Builds the network of a plan and checks it; what it points to lives until the test's end."""
    from spikeinfer.compiler.backends.tensorrt.network import define

    kept: list[Any] = []

    def check(plan: NetworkPlan, tiny: Graph, stored: Callable[[str], Any]) -> list[Finding]:
        builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
        network = define(trt, builder.create_network(0), plan, stored)
        kept.extend((builder, network))
        return check_network(network.definition, tiny, constants(tiny), TARGET)

    yield check
    kept.clear()


def test_a_true_network_has_no_findings(findings: Callable[..., list[Finding]]) -> None:
    tiny, plan = model()
    assert findings(plan, tiny, constants(tiny)) == []


@pytest.mark.parametrize(
    ("attn", "sinks"),
    [
        (", softcap=5.0", False),
        (", slopes=[0.5, 0.25]", False),
        (", softcap=5.0, slopes=[0.5, 0.25]", True),
        ("", True),
    ],
    ids=["soft-cap", "slopes", "all", "sinks"],
)
def test_spelt_out_attention_has_none_either(
    findings: Callable[..., list[Finding]], attn: str, sinks: bool
) -> None:
    tiny = graph(int4=False, attn=(attn, attn), sinks=sinks)
    assert findings(plan_network(tiny, TARGET), tiny, constants(tiny)) == []


@pytest.mark.parametrize("name", PLANNED)
def test_every_fault_of_emission_is_found(
    findings: Callable[..., list[Finding]], name: str
) -> None:
    tiny, plan = model()
    assert findings(PLANNED[name](plan), tiny, constants(tiny)) != []


@pytest.mark.parametrize("name", STORED)
def test_every_changed_constant_is_found_by_name(
    findings: Callable[..., list[Finding]], name: str
) -> None:
    tiny, plan = model()
    const, change = STORED[name]
    true = constants(tiny)
    wrong = findings(plan, tiny, lambda n: change(true(n)) if n == const else true(n))
    assert f"@{const}" in {f.where for f in wrong}


def test_a_finding_says_where() -> None:
    assert len(PLANNED) + len(STORED) >= 40
    assert (
        str(Finding("%q (linear in layers.0)", "it is off")) == "%q (linear in layers.0): it is off"
    )
