"""The planted faults, by pass, in the order of the pipeline. Each changes the meaning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults import (
    Change,
    Fault,
    Patch,
    attr,
    become,
    borrow,
    constant,
    decided,
    drop,
    literal,
    no_attr,
    nth,
    other_kernel,
    previous_rows,
    read,
    reversed_axis,
    roles_swapped,
    rounded,
    shared_by_shape,
    stream,
    swap,
)
from spikeinfer.compiler.ir import Constant, DType, Graph, Node
from spikeinfer.passes import (
    alias_kv,
    flatten_tokens,
    fold_norm_offset,
    raise_activation,
    raise_attention,
    raise_gated_mlp,
    raise_rope,
    rewrite,
    select_logit_rows,
    simplify,
)

ATTN0 = r"layers\.0\.self_attn"


def _seen(**fields: Any) -> Patch:
    """raise-attention reads another visibility from every mask."""

    def new(old: Any) -> Any:
        return lambda terms, scores: replace(
            old(terms, scores), **{k: v(old(terms, scores)) for k, v in fields.items()}
        )

    return Patch(raise_attention, "classify", new)


def _emitted(op: str, edit: Any) -> Patch:
    """Every rewrite of a pass that makes `op` edits its operands and attributes first."""

    def new(old: Any) -> Any:
        def become(root: Any, name: str, operands: Any, attrs: Any, scope: str = "") -> Any:
            operands, attrs = list(operands), dict(attrs)
            if name == op:
                edit(operands, attrs)
            return old(root, name, operands, attrs, scope)

        return become

    return Patch(rewrite, "become", new)


def _set(name: str, value: Any) -> Any:
    return lambda operands, attrs: attrs.update({name: value})


def _gelu(_: Any) -> str:
    return "gelu_tanh"


def _sigmoid(_: Any) -> str:
    return "sigmoid"


def _exchange(left: int, right: int) -> Any:
    def edit(operands: Any, attrs: Any) -> None:
        operands[left], operands[right] = operands[right], operands[left]

    return edit


def _other_style(old: Any) -> Any:
    other = {"half": "interleaved", "interleaved": "half"}
    return lambda *arguments: other.get(found := old(*arguments), found)


def _kept_offset(old: Any) -> Any:
    def fold(graph: Graph, node: Node) -> bool:
        offset = node.attrs["offset"]
        done: bool = old(graph, node)
        node.attrs["offset"] = offset
        return done

    return fold


def _forgotten_offset(old: Any) -> Any:
    def fold(graph: Graph, node: Node) -> bool:
        del node.attrs["offset"]
        return True

    return fold


def _swapped_states(old: Any) -> Any:
    def write(graph: Graph, state: Any) -> None:
        node = state.output.node
        old(graph, state)
        left, right = (".key", ".value") if state.name.endswith(".key") else (".value", ".key")
        node.attrs["state"] = state.name.replace(left, right)

    return write


def _swapped_names(old: Any) -> Any:
    def attention(self: Any, node: Node) -> None:
        old(self, node)
        made = self.flat.nodes[-1]
        made.attrs["key"], made.attrs["value"] = made.attrs["value"], made.attrs["key"]

    return attention


def _forgotten(*names: str) -> Any:
    def new(old: Any) -> Any:
        def attention(self: Any, node: Node) -> None:
            node.attrs = {k: v for k, v in node.attrs.items() if k not in names}
            old(self, node)

        return attention

    return new


def _rows_swapped(old: Any) -> Any:
    width = 96  # of the tiny phi3

    def part(graph: Graph, whole: Constant, rows: tuple[int, int] | None) -> Constant:
        if rows is not None:
            rows = ((rows[0] + width) % (2 * width), (rows[1] + width - 1) % (2 * width) + 1)
        return old(graph, whole, rows)

    return part


def _rows_off(old: Any) -> Any:
    def part(graph: Graph, whole: Constant, rows: tuple[int, int] | None) -> Constant:
        return old(graph, whole, (rows[0] - 1, rows[1] - 1) if rows and rows[0] else rows)

    return part


def _no_scale(old: Any) -> Any:
    def scaled(value: Any) -> Any:
        found = old(value)
        return found and (found[0], 1.0)

    return scaled


def _rule(name: str, other: Any) -> Patch:
    """Another function under the name of a clean-up rule."""
    return Patch(
        simplify, "RULES", lambda rules: tuple((n, other(r) if n == name else r) for n, r in rules)
    )


def _shifted_fold(old: Any) -> Any:
    def fold(walk: Any, node: Node) -> Any:
        const = old(walk, node)
        if const is not None and const.data.dtype.kind in "fi":
            const.data = const.data + const.data.dtype.type(1)
        return const

    return fold


def _slices_without_offset(old: Any) -> Any:
    def compose(walk: Any, node: Node) -> Any:
        attrs = dict(node.attrs)
        made = old(walk, node)
        if made is not None and node.op == "slice":
            made.attrs = attrs
        return made

    return compose


def _first_summand(op: str, index: int) -> Change:
    """A sum that reads its first summand twice."""

    def change(graph: Graph) -> Node:
        node = nth(graph, op, index)
        node.operands[1] = node.operands[0]
        return node

    return change


def _negated(_: Any) -> Any:
    return {**simplify._NEUTRAL, "mul": (0.5, True)}


CLEAN_UP = [
    Fault(
        "0.5 x is taken for x",
        "granite",
        "clean-up",
        Patch(simplify, "_NEUTRAL", _negated),
        r"layers\.0",
    ),
    Fault(
        "x^2 is taken for x",
        "llama",
        "clean-up",
        Patch(simplify, "_NEUTRAL", lambda old: {**old, "pow": (2.0, False)}),
        "layers.0.input_layernorm",
    ),
    Fault(
        "constants of one shape are shared",
        "gemma3_text",
        "clean-up",
        Patch(simplify.Walk, "_share_constants", lambda _: shared_by_shape),
        "rotary_emb|self_attn",
    ),
    Fault(
        "literals are rounded to tens",
        "gemma3_text",
        "clean-up",
        Patch(
            simplify,
            "_literal",
            lambda old: lambda o: (lambda v: round(v, -1) if isinstance(v, float) else v)(old(o)),
        ),
        "",
    ),
    Fault(
        "attention's scale is 1", "llama", "clean-up", literal("mul", lambda _: 1.0, 0, "self_attn")
    ),
    Fault("rotate_half without minus", "llama", "clean-up", become("neg", "cast", dtype=DType.F32)),
    Fault(
        "rotate_half takes the other half",
        "llama",
        "clean-up",
        lambda graph: _at(nth(graph, "slice", 1), start=0, end=8),
    ),
    Fault("rotate_half joins in the wrong order", "llama", "clean-up", swap("concat", 0, 1, 1)),
    Fault("sine and cosine swapped", "llama", "clean-up", become("cos", "sin")),
    Fault("mask hides the token itself", "llama", "clean-up", become("le", "lt")),
    Fault("mask is upside down", "llama", "clean-up", swap("where", 1, 2)),
    Fault("window one wider", "gemma3_text", "clean-up", become("gt", "ge")),
    Fault(
        "norm's eps 100 times as large",
        "qwen3",
        "clean-up",
        literal("add", lambda v: 100 * v, 0, "norm"),
    ),
    Fault("mean becomes sum", "llama", "clean-up", become("mean", "sum", axis=2, keepdim=True)),
    Fault("embedding's scale lost", "gemma3_text", "clean-up", literal("mul", lambda _: 1.0, 0)),
    Fault("residual subtracted", "llama", "clean-up", become("add", "sub", 0, "layers.0")),
    Fault("silu becomes sigmoid", "llama", "clean-up", become("silu", "sigmoid")),
    Fault("softmax over the wrong axis", "llama", "clean-up", attr("softmax", "axis", lambda _: 1)),
    Fault("expanded heads in the wrong order", "llama", "clean-up", reversed_axis("matmul", 0, 1)),
    Fault("queries read the keys' weight", "mha", "clean-up", borrow("linear", 1, 1)),
    Fault(
        "sunk transposes forget the norm's weight", "qwen3", "clean-up:1", drop("rms_norm", 1, 1)
    ),
    Fault(
        "shared rotations are the first layer's",
        "gemma3_text",
        "clean-up:2",
        borrow("rope", 1, 0, 3),
    ),
    Fault("cancelled transposes swap query and key", "mha", "clean-up:2", borrow("rope", 0, 1, 0)),
]
RAISE = [
    Fault("a bias is lost", "gpt2", "raise-linear", drop("linear", 2)),
    Fault(
        "a weight is not transposed",
        "gpt2",
        "raise-linear",
        constant("linear", 1, 1, transposed=False),
    ),
    Fault("the next layer's bias", "gpt2", "raise-linear", borrow("linear", 2, 4)),
    Fault("the next layer's weight", "gpt2", "raise-linear", borrow("linear", 1, 6, 2)),
    Fault(
        "a tanh GELU is read as an exact one",
        "gpt2",
        "raise-activation",
        _emitted("gelu", lambda o, a: a.clear()),
        r"h\.0\.mlp",
    ),
    Fault(
        "a GELU is read as SiLU",
        "gpt2",
        "raise-activation",
        Patch(raise_activation, "RULES", lambda rules: tuple((p, "silu", {}) for p, _, _ in rules)),
        r"h\.0\.mlp",
    ),
    Fault("a GELU of the layer's input", "gpt2", "raise-activation", borrow("gelu", 0, 0, 1)),
    Fault(
        "offset of a norm's weight lost",
        "gemma3_text",
        "raise-rms-norm",
        _emitted("rms_norm", lambda o, a: a.pop("offset", None)),
        r"layers\.0\.input_layernorm",
    ),
    Fault(
        "eps of a norm is 0",
        "llama",
        "raise-rms-norm",
        _emitted("rms_norm", _set("eps", 0.0)),
        r"layers\.0\.input_layernorm",
    ),
    Fault(
        "eps of one norm is 10 times as large",
        "llama",
        "raise-rms-norm",
        attr("rms_norm", "eps", lambda e: 10 * e, 3),
    ),
    Fault("weight of another norm", "llama", "raise-rms-norm", borrow("rms_norm", 1, 1, 0)),
    Fault("weight of a norm lost", "llama", "raise-rms-norm", drop("rms_norm", 1, 2)),
    Fault("a norm of another value", "llama", "raise-rms-norm", borrow("rms_norm", 0, 0, 1)),
    Fault("eps lost", "cohere", "raise-layer-norm", attr("layer_norm", "eps", lambda _: 0.0)),
    Fault(
        "weight of another layer norm", "cohere", "raise-layer-norm", borrow("layer_norm", 1, -1, 0)
    ),
    Fault("weight of a layer norm lost", "cohere", "raise-layer-norm", drop("layer_norm", 1)),
    Fault(
        "interleaved for half-split",
        "llama",
        "raise-rope",
        Patch(raise_rope, "_movement", _other_style),
        ATTN0,
    ),
    Fault(
        "half-split for interleaved",
        "glm",
        "raise-rope",
        Patch(raise_rope, "_movement", _other_style),
        ATTN0,
    ),
    Fault("sine for cosine", "llama", "raise-rope", swap("rope", 1, 2, 2)),
    Fault("the other base", "gemma3_text", "raise-rope", borrow("rope", 1, 0, 2)),
    Fault("keys turned as queries", "mha", "raise-rope", borrow("rope", 0, 0, 1)),
    Fault(
        "one key too few in the window",
        "gemma3_text",
        "raise-attention",
        _seen(window=lambda s: max(s.window - 1, 0)),
        ATTN0,
    ),
    Fault(
        "one key too many in the window",
        "mistral",
        "raise-attention",
        _seen(window=lambda s: s.window + 1),
        ATTN0,
    ),
    Fault("window lost", "gemma3_text", "raise-attention", _seen(window=lambda s: 0), ATTN0),
    Fault(
        "chunks for a window",
        "mistral",
        "raise-attention",
        _seen(window=lambda s: 0, chunk=lambda s: s.window),
        ATTN0,
    ),
    Fault("not causal", "llama", "raise-attention", _seen(causal=lambda s: False), ATTN0),
    Fault(
        "scale not seen",
        "llama",
        "raise-attention",
        Patch(raise_attention, "_scaled", _no_scale),
        ATTN0,
    ),
    Fault(
        "scale of one layer squared",
        "llama",
        "raise-attention",
        attr("attention", "scale", lambda s: s * s, 1),
    ),
    Fault("soft-cap lost", "gemma2", "raise-attention", no_attr("attention", "softcap", 1)),
    Fault(
        "soft-cap halved",
        "gemma2",
        "raise-attention",
        _emitted("attention", lambda o, a: a.update(softcap=a["softcap"] / 2)),
        ATTN0,
    ),
    Fault(
        "sinks lost",
        "gpt_oss",
        "raise-attention",
        _emitted("attention", lambda o, a: o.pop()),
        ATTN0,
    ),
    Fault("sinks of the other layer", "gpt_oss", "raise-attention", borrow("attention", 3, 1, 0)),
    Fault(
        "keys and values swapped",
        "llama",
        "raise-attention",
        _emitted("attention", _exchange(1, 2)),
        ATTN0,
    ),
    Fault("wrong head group", "llama", "raise-attention", reversed_axis("attention", 1, 1)),
    Fault("wrong group of values", "llama", "raise-attention", reversed_axis("attention", 2, 1, 1)),
    Fault(
        "gate and up swapped",
        "llama",
        "raise-gated-mlp",
        _emitted("gated_mlp", _exchange(1, 2)),
        r"layers\.0\.mlp",
    ),
    Fault("up is the gate", "qwen3", "raise-gated-mlp", borrow("gated_mlp", 2, 0, 0, theirs=1)),
    Fault(
        "another layer's down projection", "llama", "raise-gated-mlp", borrow("gated_mlp", 3, 0, 1)
    ),
    Fault(
        "SiLU for a tanh GELU",
        "gemma3_text",
        "raise-gated-mlp",
        no_attr("gated_mlp", "activation", 0),
    ),
    Fault(
        "exact GELU for a tanh one",
        "gemma3_text",
        "raise-gated-mlp",
        attr("gated_mlp", "activation", lambda _: "gelu_erf", 1),
    ),
    Fault(
        "packed gate and up swapped",
        "phi3",
        "raise-gated-mlp",
        Patch(raise_gated_mlp, "_part", _rows_swapped),
        r"layers\.0\.mlp",
    ),
    Fault(
        "packed rows one off",
        "phi3",
        "raise-gated-mlp",
        Patch(raise_gated_mlp, "_part", _rows_off),
        r"layers\.0\.mlp",
    ),
]
EXPERTS = [
    Fault("gate and up experts swapped", "mixtral", "raise-moe", swap("moe", 3, 4)),
    Fault("up experts read as gate", "mixtral", "raise-moe", borrow("moe", 4, 0, theirs=3)),
    Fault("down experts of another layer", "mixtral", "raise-moe", borrow("moe", 5, 1, 0)),
    Fault("weights of another layer's choice", "mixtral", "raise-moe", borrow("moe", 1, 0, 1)),
    Fault(
        "gate rows off by one",
        "mixtral",
        "raise-moe",
        constant("moe", 3, rows=lambda rows: (rows[0] + 1, rows[1] + 1)),
    ),
    Fault("experts with GELU", "mixtral", "raise-moe", attr("moe", "activation", _gelu)),
    Fault("biases of gate and up swapped", "gpt_oss", "raise-moe", swap("moe", 6, 7)),
    Fault("the clamp forgotten", "gpt_oss", "raise-moe", no_attr("moe", "limit")),
    Fault("slope of the clamped gate", "gpt_oss", "raise-moe", no_attr("moe", "alpha")),
    Fault("chosen weights not normalised", "mixtral", "raise-route", no_attr("route", "normalise")),
    Fault("sigmoid router", "mixtral", "raise-route", attr("route", "scores", _sigmoid)),
    Fault("softmax over all experts", "gpt_oss", "raise-route", no_attr("route", "softmax_chosen")),
    Fault("the router's scale forgotten", "deepseek_v3", "raise-route", no_attr("route", "scale")),
    Fault("the router's correction forgotten", "deepseek_v3", "raise-route", drop("route", 1)),
    Fault("experts of all groups", "deepseek_v3", "raise-route", no_attr("route", "groups")),
]
STATE = [
    Fault(
        "keys written to the values",
        "llama",
        "alias-kv",
        Patch(alias_kv, "_write_in_place", _swapped_states),
        ATTN0,
    ),
    Fault("values append the keys", "llama", "alias-kv", borrow("kv_append", 0, 0, 1)),
    Fault("keys of the layer before", "llama", "alias-kv", borrow("kv_append", 0, 0, 2)),
    Fault(
        "one layer's keys in another's buffer",
        "llama",
        "alias-kv",
        attr("kv_append", "state", lambda _: "layers.0.key", 2),
    ),
    Fault(
        "attention reads values as keys",
        "llama",
        "alias-kv",
        borrow("attention", 1, 0, 0, theirs=2),
    ),
    Fault(
        "key and value pools swapped",
        "llama",
        "flatten-tokens",
        Patch(flatten_tokens._Flattening, "_attention", _swapped_names),
        ATTN0,
    ),
    Fault(
        "pools of the other layer",
        "llama",
        "flatten-tokens",
        attr("paged_attention", "key", lambda _: "layers.0.key", 1),
    ),
    Fault(
        "window not taken along",
        "gemma3_text",
        "flatten-tokens",
        Patch(flatten_tokens._Flattening, "_attention", _forgotten("window")),
        ATTN0,
    ),
    Fault(
        "soft-cap not taken along",
        "gemma2",
        "flatten-tokens",
        Patch(flatten_tokens._Flattening, "_attention", _forgotten("softcap")),
        ATTN0,
    ),
    Fault(
        "scale of the other layer type",
        "llama",
        "flatten-tokens",
        attr("paged_attention", "scale", lambda s: s / 2, 1),
    ),
    Fault(
        "new keys are the values",
        "llama",
        "flatten-tokens",
        borrow("paged_attention", 1, 0, 0, theirs=2),
    ),
    Fault(
        "rows written at their positions",
        "llama",
        "flatten-tokens",
        read("paged_attention", 3, "positions"),
    ),
    Fault("rotated by slots", "llama", "flatten-tokens", read("reshape", 0, "slots")),
    Fault(
        "learned positions are tokens", "gpt2", "flatten-tokens", read("embedding", 1, "tokens", 1)
    ),
    Fault(
        "heads in another order", "llama", "flatten-tokens", reversed_axis("paged_attention", 0, 1)
    ),
    Fault(
        "layers share the first one's rotation",
        "gemma3_text",
        "flatten-tokens",
        borrow("rope", 1, 0, 3),
    ),
    Fault(
        "packed slices start at 0",
        "gpt2",
        "flatten-tokens",
        lambda graph: _at(nth(graph, "slice", 1), start=0, end=64),
    ),
    Fault("row before the wanted one", "llama", "select-logit-rows", previous_rows()),
    Fault(
        "rows of another stream",
        "gemma3_text",
        "select-logit-rows",
        stream("index_select", 0, "embedding", 1),
    ),
    Fault(
        "attention on selected rows",
        "llama",
        "select-logit-rows",
        Patch(select_logit_rows, "MIXES_TOKENS", lambda _: ("kv_append",)),
        ATTN0,
    ),
    Fault("head reads the wrong norm", "llama", "select-logit-rows", borrow("rms_norm", 1, 0, -1)),
]
FUSE = [
    Fault(
        "offset folded and kept",
        "gemma3_text",
        "fold-norm-offset",
        Patch(fold_norm_offset, "_fold", _kept_offset),
        r"layers\.0\.input_layernorm",
    ),
    Fault(
        "offset forgotten",
        "gemma3_text",
        "fold-norm-offset",
        Patch(fold_norm_offset, "_fold", _forgotten_offset),
        r"layers\.0\.input_layernorm",
    ),
    Fault(
        "offset folded twice",
        "gemma3_text",
        "fold-norm-offset",
        constant("rms_norm", 1, 2, plus=lambda p: 2 * p),
    ),
    Fault(
        "folded into another norm's weight",
        "gemma3_text",
        "fold-norm-offset",
        borrow("rms_norm", 1, 1, 4),
    ),
    Fault(
        "residual is the block's input",
        "llama",
        "fuse-residual",
        stream("linear_residual", 2, "embedding", 1),
    ),
    Fault(
        "residual is the product's input",
        "llama",
        "fuse-residual",
        borrow("linear_residual", 2, 0, 0, theirs=0),
    ),
    Fault("bias lost in the fusion", "gpt2", "fuse-residual", drop("linear_residual", 3)),
    Fault("bias of another layer", "gpt2", "fuse-residual", borrow("linear_residual", 3, 2, 0)),
    Fault("gated MLP forgets the residual", "llama", "fuse-residual", drop("gated_mlp", 4)),
    Fault(
        "gated MLP adds its normed input",
        "llama",
        "fuse-residual",
        borrow("gated_mlp", 4, 0, 0, theirs=0),
    ),
    Fault(
        "fused weight of another layer",
        "llama",
        "fuse-residual",
        borrow("linear_residual", 1, 1, 0),
    ),
]
PLACE = [
    Fault(
        "roles of query and key swapped", "llama", "assign-roles", roles_swapped("attn_q", "attn_k")
    ),
    Fault(
        "roles of key and value swapped", "llama", "assign-roles", roles_swapped("attn_k", "attn_v")
    ),
    Fault(
        "roles of gate and up swapped", "llama", "assign-roles", roles_swapped("ffn_gate", "ffn_up")
    ),
    Fault(
        "roles of gate and down swapped",
        "llama",
        "assign-roles",
        roles_swapped("ffn_gate", "ffn_down"),
    ),
    Fault(
        "a norm with the role of a matrix",
        "llama",
        "assign-roles",
        decided("norm", role="attn_output"),
    ),
    Fault(
        "the head is no embedding", "llama", "assign-roles", roles_swapped("output", "token_embd")
    ),
    Fault("a packed norm weight", "llama", "assign-storage", decided("norm", format="q4_k")),
    Fault(
        "a matrix stored as an array",
        "llama",
        "assign-storage",
        decided("ffn_down", format="array"),
    ),
    Fault("a packed bias", "gpt2", "assign-storage", decided("bias", format="q8_0")),
    Fault(
        "a parameter's other rows",
        "phi3",
        "assign-storage",
        constant("gated_mlp", 1, rows=(96, 192), format="f32", role="ffn_gate"),
    ),
    Fault("queries and keys swapped", "mha", "fuse-qkv", swap("qkv", 1, 2)),
    Fault("values of another layer", "llama", "fuse-qkv", borrow("qkv", 3, 1, 0)),
    Fault("projections of the unnormed input", "llama", "fuse-qkv", stream("qkv", 0, "embedding")),
    Fault(
        "rows of the packed projection off by one",
        "phi3",
        "fuse-qkv",
        constant("qkv", 2, rows=lambda rows: (rows[0] + 1, rows[1] + 1)),
    ),
    Fault("biases of queries and keys swapped", "gpt2", "fuse-qkv", swap("qkv", 4, 5)),
    Fault("angles rounded to f16", "llama", "assign-precision", rounded("cos", DType.F16)),
    Fault("a rounded residual", "llama", "assign-precision", rounded("rms_norm", DType.BF16)),
    Fault(
        "the kernel of another op",
        "llama",
        "assign-kernels",
        other_kernel("linear", "reference.linear_residual"),
    ),
    Fault(
        "attention of the functional graph",
        "llama",
        "assign-kernels",
        other_kernel("paged_attention", "reference.attention"),
    ),
]
FAULTS = [*CLEAN_UP, *RAISE, *EXPERTS, *STATE, *FUSE, *PLACE]


def _at(node: Node, **attrs: Any) -> Node:
    node.attrs.update(attrs)
    return node
