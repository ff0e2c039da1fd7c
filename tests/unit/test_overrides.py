"""Overrides: who is matched, who wins, what does not fit, and what matches nothing."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from spikeinfer import SpikeError
from spikeinfer.compiler.assembly.overrides import Override, Overrides, first_given, layer_of
from spikeinfer.compiler.ir import Constant, DType, TensorType
from spikeinfer.compiler.quantize import Given
from spikeinfer.console.recipes import load

DOWN = "model.layers.{}.mlp.down_proj.weight"


def matrix(parameter: str, role: str, k: int = 512) -> Constant:
    return Constant(parameter, TensorType(DType.F32, (64, k)), parameter, role=role)


def answer(overrides: list[Override], const: Constant) -> Given | None:
    return Overrides(overrides)(const)


@pytest.mark.parametrize(
    ("override", "layers"),
    [
        (Override("q6_k", match="*.down_proj.weight"), [0, 3, 12]),
        (Override("q6_k", match="down_proj"), []),  # a glob covers the whole name
        (Override("q6_k", match="/down_proj/"), [0, 3, 12]),
        (Override("q6_k", match=r"/layers\.[03]\./"), [0, 3]),
        (Override("q6_k", layers="0-3"), [0, 3]),
        (Override("q6_k", layers="3,12-20"), [3, 12]),
        (Override("q6_k", role="ffn_down", layers="0"), [0]),
        (Override("q6_k", role="ffn_up", layers="0"), []),  # all conditions must hold
    ],
)
def test_what_an_override_matches(override: Override, layers: list[int]) -> None:
    found = [
        layer for layer in (0, 3, 12) if answer([override], matrix(DOWN.format(layer), "ffn_down"))
    ]
    assert found == layers


def test_the_first_that_holds_wins() -> None:
    rules = [Override("f16", layers="0"), Override("q6_k", role="ffn_down")]
    formats = [answer(rules, matrix(DOWN.format(i), "ffn_down")) for i in (0, 1)]
    assert [given and given.format for given in formats] == ["f16", "q6_k"]
    assert answer(rules, matrix("lm_head.weight", "output")) is None  # no layer, another role


def test_the_plan_says_which_override_and_what_did_not_fit() -> None:
    given = answer([Override("q6_k", role="ffn_down")], matrix(DOWN.format(0), "ffn_down", 96))
    assert given == Given(
        "q8_0", "override: role ffn_down", "K = 96 is not a multiple of 256, which q6_k needs"
    )


def test_routers_listen_to_their_role_only() -> None:
    router = matrix("model.layers.0.mlp.gate.weight", "ffn_gate_inp")
    assert answer([Override("q8_0", match="*")], router) is None
    assert answer([Override("q8_0", role="ffn_gate_inp")], router) is not None


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        (Override("q6_k", match="*.donw_proj.weight"), DOWN.format(1)),
        (Override("q6_k", role="attn_v"), "ffn_down, output"),
        (Override("q6_k", layers="2-9"), "0-1"),
    ],
)
def test_what_matches_nothing_is_an_error(override: Override, hint: str) -> None:
    overrides = Overrides([Override("f16", layers="0"), override])
    for layer in (0, 1):
        overrides(matrix(DOWN.format(layer), "ffn_down"))
    overrides(matrix("lm_head.weight", "output"))
    with pytest.raises(SpikeError) as caught:
        overrides.check()
    assert caught.value.code == "SPK421"
    assert str(override) in caught.value.what
    assert hint in caught.value.remedy


def test_what_matches_nothing_is_found_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("version: 1\nformats:\n  - {role: output, format: q6_k}\n"
                    "  - {layers: 7, format: q6_k}\n")  # fmt: skip
    given = load(str(path)).options["formats"]
    overrides = Overrides(cast("tuple[Override, ...]", given))
    overrides(matrix("lm_head.weight", "output"))
    with pytest.raises(SpikeError, match=rf"SPK421 quantization: {path}, line 4: the override of"):
        overrides.check()
    assert overrides.overrides[1].to_json() == {"layers": "7", "format": "q6_k"}


def test_a_shadowed_override_is_none_that_matches_nothing() -> None:
    overrides = Overrides([Override("f16", layers="0"), Override("q6_k", role="ffn_down")])
    overrides(matrix(DOWN.format(0), "ffn_down"))
    overrides.check()


def test_sources_are_asked_in_order() -> None:
    def second(_: Constant) -> Given:
        return Given("q8_0", "second")

    given = first_given(Overrides([Override("f16", layers="0")]), second)
    assert [given(matrix(DOWN.format(i), "ffn_down")).format for i in (0, 1)] == ["f16", "q8_0"]


@pytest.mark.parametrize(
    ("name", "layer"),
    [(DOWN.format(7), 7), ("transformer.h.11.attn.c_attn.weight", 11), ("lm_head.weight", None)],
)
def test_layers_are_read_off_names(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer
