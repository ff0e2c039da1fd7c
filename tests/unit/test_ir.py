"""The IR: dims, text round trip, verifier, interpreter."""

from __future__ import annotations

import pytest
import torch
from spikeinfer.compiler.ir import (
    OPS,
    Interpreter,
    IrSyntaxError,
    PagedState,
    SymDim,
    VerifyError,
    parse_dim,
    parse_graph,
    print_graph,
    symbol,
    verify,
)

NORM = """graph norm traced {
  input %x : f32[T, 4]
  const @w : f32[4] = parameter "norm.weight"
  const @half : f32[1] = data "AAAAPw=="
  %sq = pow(%x, 2) : f32[T, 4] in model.norm
  %ms = mean(%sq, axis=-1, keepdim=true) : f32[T, 1] in model.norm
  %a = add(%ms, 1e-05) : f32[T, 1] in model.norm
  %r = rsqrt(%a) : f32[T, 1] in model.norm
  %n = mul(%x, %r) : f32[T, 4] in model.norm
  %y = mul(%n, @w) : f32[T, 4] in model.norm
  %z = mul(%y, @half) : f32[T, 4]
  %k, %i = topk(%z, k=2) : f32[T, 2], i64[T, 2]
  output %k
}
"""


@pytest.mark.parametrize("text", ["P+S", "B*S", "2*S", "B*P+B*S-1", "7", "-S", "S-1"])
def test_dims_round_trip(text: str) -> None:
    dim = parse_dim(text)
    assert parse_dim(str(dim)) == dim


def test_dims_simplify_to_ints() -> None:
    past, step = symbol("P"), symbol("S")
    assert past + step - past - step == 0
    total = (past + 1) * (step + 2)
    assert isinstance(total, SymDim)
    assert total.evaluate({"P": 3, "S": 4}) == 24
    assert total.substitute({"P": 0}) == step + 2


@pytest.mark.parametrize("text", ["", "P+", "a b", "*", "P/2"])
def test_dims_reject_other_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a dimension"):
        parse_dim(text)


def test_text_round_trips_exactly() -> None:
    graph = parse_graph(NORM)
    verify(graph)
    assert print_graph(graph) == NORM


def test_interpreter_runs_primitives() -> None:
    x, w = torch.randn(3, 4), torch.randn(4)
    (top,) = Interpreter(parse_graph(NORM), {"norm.weight": w}.__getitem__).run({"x": x})
    expected = torch.nn.functional.rms_norm(x, (4,), w, 1e-5) * 0.5
    torch.testing.assert_close(top, expected.topk(2).values)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mul(%x, %r) : f32[T, 4]", "mul(%x, %r) : f32[T, 5]", "its operands give f32\\[T, 4\\]"),
        ("pow(%x, 2)", "rms_norm(%x, eps=1e-05)", "not allowed at level traced"),
        ("axis=-1, keepdim=true", "axis=2, keepdim=true", "axis 2 of a rank 2"),
        ("topk(%z, k=2)", "topk(%z, k=2, axis=true)", "is not a int"),
    ],
)
def test_verifier_names_the_violation(old: str, new: str, message: str) -> None:
    graph = parse_graph(NORM.replace(old, new))
    with pytest.raises(VerifyError, match=message):
        verify(graph)


def test_parser_names_the_line() -> None:
    with pytest.raises(IrSyntaxError, match="line 5: unknown op 'powr'"):
        parse_graph(NORM.replace("pow(", "powr("))
    with pytest.raises(IrSyntaxError, match="line 6: 'gone'"):
        parse_graph(NORM.replace("mean(%sq", "mean(%gone"))


def test_every_op_says_what_it_means() -> None:
    assert all(op.doc for op in OPS.values())
    assert len(OPS) > 60


PAGED = """graph paged fused {
  input %q : f32[T, 4, 8]
  input %k : f32[T, 2, 8]
  input %v : f32[T, 2, 8]
  input %slots : i32[T]
  input %starts : i32[B1]
  input %lens : i32[B]
  input %tables : i32[B, M]
  state k0 : f32[N, 2, 8] axis=0 kind=kv
  state v0 : f32[N, 2, 8] axis=0 kind=kv
  %o = paged_attention(%q, %k, %v, %slots, %starts, %lens, %tables, key="k0", value="v0", scale=0.5, window=3) : f32[T, 4, 8]
  output %o
}
"""  # noqa: E501
DENSE = """graph dense fused {
  input %q : f32[B, 4, S, 8]
  input %k : f32[B, 2, S, 8]
  input %v : f32[B, 2, S, 8]
  %o = attention(%q, %k, %v, scale=0.5, window=3) : f32[B, 4, S, 8]
  output %o
}
"""


def test_paged_attention_equals_dense_in_two_steps_over_poisoned_pools() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(7, 4, 8), torch.randn(7, 2, 8), torch.randn(7, 2, 8)
    heads = {"q": q, "k": k, "v": v}
    dense = {n: t.transpose(0, 1).unsqueeze(0) for n, t in heads.items()}
    (expected,) = Interpreter(parse_graph(DENSE), {}.__getitem__).run(dense)
    pools = {n: PagedState(torch.full((12, 2, 8), float("nan")), 4) for n in ("k0", "v0")}
    runner = Interpreter(parse_graph(PAGED), {}.__getitem__, dict(pools))
    got = []
    for start, end in ((0, 5), (5, 7)):
        slots = torch.tensor([(8 + i) if i < 4 else i - 4 for i in range(start, end)])
        (out,) = runner.run(
            {
                **{n: t[start:end] for n, t in heads.items()},
                "slots": slots,
                "starts": torch.tensor([0, end - start]),
                "lens": torch.tensor([end]),
                "tables": torch.tensor([[2, 0, 1]]),
            }
        )
        got.append(out)
    torch.testing.assert_close(torch.cat(got), expected[0].transpose(0, 1))
