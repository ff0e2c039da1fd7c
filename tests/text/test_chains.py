"""Graphs of ONNX nodes before and after ours have become chains."""

from __future__ import annotations

from onnx import TensorProto, helper
from spikeinfer.compiler.backends.chains import chain_nodes, one_link
from spikeinfer.compiler.backends.emission import DOMAIN, Emission, StoredTensor
from spikeinfer.compiler.backends.folds import Folds
from spikeinfer.compiler.ir import Users, parse_graph

EMPTY = parse_graph("graph step fused {\n}\n")
STORED = {
    "w": StoredTensor(TensorProto.UINT8, (512,), 4096, 512),
    "n": StoredTensor(TensorProto.FLOAT, (16,), 8192, 64),
}


def emission(*lines: str, outputs: tuple[str, ...]) -> Emission:
    """Nodes from lines such as "y = spike.Linear x @w k=16"; "y = Cos x" is ONNX Runtime's."""
    made = Emission(EMPTY, STORED, "rank0.weights", Folds(Users(EMPTY)))
    for line in lines:
        results, call = line.split(" = ")
        name, *words = call.split()
        inputs = ["" if word == "-" else word for word in words if "=" not in word]
        given = dict(word.split("=") for word in words if "=" in word)
        attributes = {k: int(v) if v.isdigit() else v for k, v in given.items()}
        op, domain = name.removeprefix("spike."), DOMAIN if name.startswith("spike.") else ""
        made.nodes.append(
            helper.make_node(op, inputs, results.split(), domain=domain, **attributes)
        )
        for word in inputs:
            at = STORED.get(word.removeprefix("@"))
            if word.startswith("@") and at is not None:
                made.initialisers[word] = made.external(
                    word, at.dtype, at.shape, at.offset, at.length
                )
    made.outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outputs]
    return made


def text(made: Emission) -> str:
    """The nodes; chains with their links below them."""
    lines = []
    for node in made.nodes:
        lines.append(f"{' '.join(node.output)} = {node.op_type} {' '.join(node.input)}")
        for attribute in node.attribute:
            if attribute.name == "links":
                lines += [f"  {link}" for link in attribute.s.decode().splitlines()]
    return "\n".join(lines)


def test_nodes_that_follow_one_another_are_one() -> None:
    made = emission(
        "h = spike.RmsNorm x @n",
        "y = spike.Linear h @w - x format=q8_0 k=16 n=16",
        "z = spike.Linear y @w format=q8_0 k=16 n=16",
        outputs=("z",),
    )
    chain_nodes(made)
    assert text(made) == (
        "z = Chain @weights x\n"
        "  %2 = RmsNorm %1 @8192:f32[16]\n"
        "  %3 = Linear %2 @4096:u8[512] - %1 format=q8_0 k=16 n=16\n"
        "  %4 = Linear %3 @4096:u8[512] format=q8_0 k=16 n=16\n"
        "  return %4"
    )
    assert list(made.initialisers) == ["@weights"]
    place = {entry.key: entry.value for entry in made.initialisers["@weights"].external_data}
    assert place == {"location": "rank0.weights", "offset": "0", "length": "8256"}


def test_a_chain_ends_where_another_s_node_needs_it() -> None:
    made = emission(
        "a = spike.Linear x @w",
        "c = Cos p",
        "s = Sigmoid a",
        "b = spike.RmsNorm a @n",
        "y = spike.Rope b c s",
        outputs=("y",),
    )
    chain_nodes(made)
    assert text(made) == (
        "c = Cos p\n"
        "a b = Chain @weights x\n"
        "  %2 = Linear %1 @4096:u8[512]\n"
        "  %3 = RmsNorm %2 @8192:f32[16]\n"
        "  return %2 %3\n"
        "s = Sigmoid a\n"
        "y = Chain b c s\n"
        "  %3 = Rope %0 %1 %2\n"
        "  return %3"
    )
    assert [value.name for value in made.between] == ["a", "b"]


def test_a_result_that_leaves_the_graph_leaves_its_chain() -> None:
    made = emission("a = spike.RmsNorm x @n", "y = spike.RmsNorm a @n", outputs=("a", "y"))
    chain_nodes(made)
    assert text(made).endswith("return %2 %3")
    assert not made.between


def test_a_graph_without_our_ops_stays() -> None:
    made = emission("y = Cos x", "z = Sigmoid y", outputs=("z",))
    chain_nodes(made)
    assert text(made) == "y = Cos x\nz = Sigmoid y"


def test_a_chain_of_one() -> None:
    node = helper.make_node("Linear", ["x", "w", "", "x"], ["y"], k=16, norm_eps=1e-5)
    assert one_link(node) == "%2 = Linear %0 %1 - %0 k=16 norm_eps=1e-05\nreturn %2"
