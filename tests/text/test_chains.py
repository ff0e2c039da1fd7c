"""Nodes of ours that follow one another become one node."""

from __future__ import annotations

from collections.abc import Iterable

import onnx
from onnx import NodeProto, TensorProto, helper
from spikeinfer.compiler.backends.chains import chain_nodes
from spikeinfer.compiler.backends.emission import Emission, StoredTensor
from spikeinfer.compiler.backends.folds import Folds
from spikeinfer.compiler.ir import Graph, Users, parse_graph

EMPTY = """graph g placed {
  input %x : f32[T, 4]
  output %x
}
"""
STORED = {
    "table": StoredTensor(TensorProto.UINT8, (1000,), 4096, 1000),
    "norm": StoredTensor(TensorProto.FLOAT, (64,), 8192, 256),
    "half": StoredTensor(TensorProto.FLOAT16, (64,), 12288, 128),
}


def emission_of(nodes: Iterable[NodeProto], outputs: Iterable[str]) -> Emission:
    """As after all nodes of a graph are there; constants are written @name."""
    graph: Graph = parse_graph(EMPTY)
    emission = Emission(graph, STORED, "rank0.weights", Folds(Users(graph)))
    emission.nodes = list(nodes)
    for name, at in STORED.items():
        emission.initialisers[f"@{name}"] = emission.external(f"@{name}", at)
    emission.initialisers["ones"] = helper.make_tensor("ones", TensorProto.FLOAT, [64], [1.0] * 64)
    emission.outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs
    ]
    return emission


def ours(op: str, inputs: str, outputs: str, **attributes: object) -> NodeProto:
    names = ["" if name == "-" else name for name in inputs.split()]
    return helper.make_node(op, names, outputs.split(), domain="spike", **attributes)


def theirs(op: str, inputs: str, output: str) -> NodeProto:
    return helper.make_node(op, inputs.split(), [output])


def text_of(emission: Emission) -> list[str]:
    """A line per node, and the links of chains below them."""
    lines = []
    for node in emission.nodes:
        lines.append(f"{' '.join(node.output)} = {node.op_type}({' '.join(node.input)})")
        for attribute in node.attribute:
            lines += [f"  {line}" for line in attribute.s.decode().splitlines()]
    return lines


def chained(nodes: Iterable[NodeProto], *outputs: str) -> Emission:
    emission = emission_of(nodes, outputs)
    chain_nodes(emission)
    return emission


def test_nodes_in_a_row_and_constants_by_their_place() -> None:
    emission = chained(
        [
            ours("Embedding", "tokens @table", "e", format="q8_0", n=10, k=64),
            ours("RmsNorm", "e @norm e", "n", eps=1e-5),
            ours("RmsNorm", "n ones", "y", eps=0.1),
        ],
        "y",
    )
    assert text_of(emission) == [
        "y = Chain(@weights tokens ones)",
        "  %3 = Embedding %1 @4096:u8[1000] format=q8_0 k=64 n=10",
        "  %4 = RmsNorm %3 @8192:f32[64] %3 eps=1e-05",
        "  %5 = RmsNorm %4 %2 eps=0.1",
        "  return %5",
    ]
    weights = emission.initialisers["@weights"]
    assert list(emission.initialisers) == ["ones", "@weights"]
    assert weights.dims == [12288 + 128]
    found = {entry.key: entry.value for entry in weights.external_data}
    assert found == {"location": "rank0.weights", "offset": "0", "length": "12416"}


def test_what_is_left_out_and_what_others_read() -> None:
    """Angles are of ONNX Runtime and wait for nothing: they go first."""
    emission = chained(
        [
            ours("RmsNorm", "x ones", "h", eps=1.0),
            theirs("Cos", "angles", "cos"),
            theirs("Sin", "angles", "sin"),
            ours("Rope", "h cos sin", "r", style="half"),
            ours("Linear", "r w - h", "y", format="f32", n=64, k=64),
            theirs("Neg", "h", "z"),
        ],
        "y",
        "z",
    )
    assert text_of(emission) == [
        "cos = Cos(angles)",
        "sin = Sin(angles)",
        "h y = Chain(x ones cos sin w)",
        "  %5 = RmsNorm %0 %1 eps=1.0",
        "  %6 = Rope %5 %2 %3 style=half",
        "  %7 = Linear %6 %4 - %5 format=f32 k=64 n=64",
        "  return %5 %7",
        "z = Neg(h)",
    ]
    assert [value.name for value in emission.between] == ["h"]


def test_a_node_of_another_kind_between_makes_two_chains() -> None:
    """c does not wait for the cast and joins the first; f16 constants stay as they are."""
    emission = chained(
        [
            ours("RmsNorm", "x @norm", "a", eps=1.0),
            theirs("Mul", "a @half", "b"),
            ours("RmsNorm", "a @norm", "c", eps=1.0),
            ours("RmsNorm", "b c", "d", eps=1.0),
        ],
        "d",
    )
    assert text_of(emission) == [
        "a c = Chain(@weights x)",
        "  %2 = RmsNorm %1 @8192:f32[64] eps=1.0",
        "  %3 = RmsNorm %2 @8192:f32[64] eps=1.0",
        "  return %2 %3",
        "b = Mul(a @half)",
        "d = Chain(b c)",
        "  %2 = RmsNorm %0 %1 eps=1.0",
        "  return %2",
    ]
    assert set(emission.initialisers) == {"@half", "@weights"}


def test_types_between_chains_are_told() -> None:
    """ONNX Runtime can't know what a chain's outputs are."""
    emission = chained(
        [
            ours("Route", "x", "weights ids", experts=4, k=2),
            theirs("Identity", "ids", "same"),
            ours("MoE", "x weights same gate up down", "y"),
        ],
        "y",
    )
    kinds = {value.name: value.type.tensor_type.elem_type for value in emission.between}
    assert kinds == {"weights": TensorProto.FLOAT, "ids": TensorProto.INT64}


def test_no_node_of_ours_nothing_to_do() -> None:
    nodes = [theirs("Neg", "x", "y")]
    emission = chained(nodes, "y")
    assert [onnx.helper.printable_node(n) for n in emission.nodes] == [
        onnx.helper.printable_node(n) for n in nodes
    ]
    assert not emission.initialisers
