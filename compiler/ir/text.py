"""The text form of a graph: printing and parsing round-trip exactly.

    graph llama traced {
      input %tokens : i64[B, S]
      const @embed : f32[256, 64] = parameter "model.embed_tokens.weight"
      const @inv_freq : f32[2] = data "AACAPwrXIzw="
      state layers.0.key : f32[B, 2, P, 16] axis=2 kind=kv input=%past output=%present
      %x = embedding(@embed, %tokens) : f32[B, S, 64] in model.embed_tokens
      %y = mul(%x, 8.0) : f32[B, S, 64] as f16 in model
      output %y
    }

``as f16`` is a value's precision (see `Value`). Data is base64 of little-endian bytes. Comments
start with ``//``.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from .graph import Attr, AttrItem, Constant, Graph, Level, Node, Operand, State, Value
from .ops import OPS
from .types import DType, SymDim, TensorType, parse_dim

NUMPY_DTYPE = {
    DType.F32: "<f4",
    DType.F16: "<f2",
    DType.F64: "<f8",
    DType.I64: "<i8",
    DType.I32: "<i4",
    DType.U8: "u1",
    DType.BOOL: "?",
}


class IrSyntaxError(ValueError):
    """IR text that cannot be parsed; the message starts with the line number."""


def print_graph(graph: Graph) -> str:
    """The graph as text."""
    lines = [f"graph {graph.name} {graph.level.value} {{"]
    lines += [f"  input %{v.name} : {v.type}" for v in graph.inputs]
    lines += [f"  {_const_text(c)}" for c in graph.constants.values()]
    lines += [f"  {_state_text(s)}" for s in graph.states.values()]
    lines += [f"  {print_node(n)}" for n in graph.nodes]
    lines += [f"  output %{v.name}" for v in graph.outputs]
    return "\n".join([*lines, "}\n"])


def print_node(node: Node) -> str:
    """One node as text."""
    names = ", ".join(f"%{v.name}" for v in node.results)
    arguments = [_operand_text(o) for o in node.operands]
    arguments += [f"{k}={_attr_text(v)}" for k, v in node.attrs.items()]
    types = ", ".join(map(_type_text, node.results))
    tail = (f" by {node.kernel}" if node.kernel else "") + (f" in {node.scope}" * bool(node.scope))
    return f"{names} = {node.op}({', '.join(arguments)}) : {types}{tail}"


def _type_text(value: Value) -> str:
    return str(value.type) + (f" as {value.precision.value}" if value.precision else "")


def _const_text(const: Constant) -> str:
    if const.data is None:
        source = f"parameter {json.dumps(const.parameter)}"
    else:
        raw = np.ascontiguousarray(const.data, dtype=NUMPY_DTYPE[const.dtype]).tobytes()
        source = f'data "{base64.b64encode(raw).decode()}"'
    tail = " transposed" if const.transposed else ""
    tail += f" rows={':'.join(map(str, const.rows))}" if const.rows else ""
    tail += f" plus={const.plus}" if const.plus else ""
    tail += "".join(f" {k}={v}" for k, v in (("format", const.format), ("role", const.role)) if v)
    return f"const @{const.name} : {const.type} = {source}{tail}"


def _state_text(state: State) -> str:
    fields = [f"axis={state.axis}", f"kind={state.kind}"]
    fields += [f"input=%{state.input.name}"] if state.input else []
    fields += [f"output=%{state.output.name}"] if state.output else []
    fields += [f"format={state.format}"] if state.format else []
    return f"state {state.name} : {state.type} {' '.join(fields)}"


def _operand_text(operand: Operand) -> str:
    if isinstance(operand, Value):
        return f"%{operand.name}"
    return f"@{operand.name}" if isinstance(operand, Constant) else _attr_text(operand)


def _attr_text(attr: Attr) -> str:
    if isinstance(attr, tuple):
        return f"[{', '.join(map(_attr_text, attr))}]"
    if isinstance(attr, bool):
        return str(attr).lower()
    if isinstance(attr, DType):
        return attr.value
    return json.dumps(attr) if isinstance(attr, str) else str(attr)


def parse_graph(text: str) -> Graph:
    """Inverse of `print_graph`. Raises IrSyntaxError with the line number."""
    return _Parser(text).parse()


_NODE = re.compile(r"(%.+?) = (\w+)\((.*)\) : (.+?)(?: by ([\w.]+))?(?: in ([\w.]+))?$")
_RESULT = re.compile(r"(\w+\[[^\]]*\])(?: as (\w+))?")
_CONST = re.compile(r'const @([\w.]+) : (\S+\[.*?\]) = (parameter|data) ("(?:[^"\\]|\\.)*")(.*)$')
_STATE = re.compile(r"state ([\w.]+) : (\S+\[.*?\])(.*)$")
_INPUT = re.compile(r"input %([\w.]+) : (.+)$")
_OUTPUT = re.compile(r"output %([\w.]+)$")
_HEADER = re.compile(r"graph ([\w.-]+) (\w+) \{$")
_ITEM = re.compile(r'\s*((?:"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^,"\[])+)\s*(?:,|$)')


def _items(text: str) -> Iterator[str]:
    """Splits at commas outside quotes and brackets."""
    position = 0
    while position < len(text):
        match = _ITEM.match(text, position)
        if match is None:
            raise ValueError(f"cannot read {text[position:]!r}")
        yield match[1].strip()
        position = match.end()


def _number(text: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else float(text)


def _parse_attr(text: str, kind: str) -> Attr:
    if kind in ("ints", "dims", "floats"):
        each = "float" if kind == "floats" else "dim"
        return tuple(_parse_item(t, each) for t in _items(text.strip("[]")))
    return _parse_item(text, kind)


def _parse_item(text: str, kind: str) -> AttrItem:
    if kind == "str":
        return str(json.loads(text))
    if kind == "dtype":
        return DType(text)
    if kind == "dim":
        return parse_dim(text)
    if kind == "scalar":
        try:
            return _number(text)
        except ValueError:
            return parse_dim(text)
    return _number(text)


class _Parser:
    def __init__(self, text: str) -> None:
        stripped = (re.sub(r"(^|\s+)//.*$", "", line).strip() for line in text.splitlines())
        self.lines = [(i, line) for i, line in enumerate(stripped, 1) if line]
        self.graph = Graph("")
        self.values: dict[str, Value] = {}
        self.late: list[tuple[State, dict[str, str]]] = []

    def parse(self) -> Graph:
        if not self.lines or self.lines[-1][1] != "}":
            raise IrSyntaxError("line 1: a graph ends with a closing brace")
        number = 1
        try:
            for line_number, line in self.lines[:-1]:
                number = line_number
                self._line(line)
            for state, fields in self.late:
                self._bind(state, fields)
        except (ValueError, KeyError) as error:
            raise IrSyntaxError(f"line {number}: {error}") from error
        return self.graph

    def _line(self, line: str) -> None:
        if match := _HEADER.match(line):
            self.graph.name, self.graph.level = match[1], Level(match[2])
        elif match := _INPUT.match(line):
            self.graph.inputs.append(self._define(match[1], TensorType.parse(match[2])))
        elif match := _CONST.match(line):
            self._const(match)
        elif match := _STATE.match(line):
            self._state(match)
        elif match := _OUTPUT.match(line):
            self.graph.outputs.append(self.values[match[1]])
        elif match := _NODE.match(line):
            self._node(match)
        else:
            raise ValueError(f"cannot read {line!r}")

    def _define(self, name: str, kind: TensorType, node: Node | None = None) -> Value:
        if name in self.values:
            raise ValueError(f"%{name} is defined twice")
        self.values[name] = Value(name, kind, node)
        return self.values[name]

    def _const(self, match: re.Match[str]) -> None:
        kind, text = TensorType.parse(match[2]), json.loads(match[4])
        flags = match[5].split()
        fields = dict(f.split("=", 1) for f in flags if "=" in f)
        const = Constant(match[1], kind, transposed="transposed" in flags)
        if "rows" in fields:
            const.rows = tuple(map(int, fields["rows"].split(":")))
        const.plus = float(fields.get("plus", 0))
        const.format, const.role = fields.get("format", ""), fields.get("role", "")
        if match[3] == "parameter":
            const.parameter = text
        else:
            const.data = _decode(text, kind)
        self.graph.constants[const.name] = const

    def _state(self, match: re.Match[str]) -> None:
        fields = dict(f.split("=", 1) for f in match[3].split())
        state = State(match[1], TensorType.parse(match[2]), int(fields["axis"]))
        self.graph.states[state.name] = state
        self.late.append((state, fields))

    def _bind(self, state: State, fields: dict[str, str]) -> None:
        state.kind, state.format = fields.get("kind", "kv"), fields.get("format", "")
        for side in ("input", "output"):
            if side in fields:
                setattr(state, side, self.values[fields[side].lstrip("%")])

    def _operand(self, text: str) -> Operand:
        if text.startswith("%"):
            return self.values[text[1:]]
        return self.graph.constants[text[1:]] if text.startswith("@") else _number(text)

    def _node(self, match: re.Match[str]) -> None:
        node = Node(match[2], [], {}, [], match[6] or "", match[5] or "")
        if node.op not in OPS:
            raise ValueError(f"unknown op {node.op!r}")
        specs = OPS[node.op].attrs
        for item in _items(match[3]):
            name, equals, text = item.partition("=")
            if equals and name in specs:
                node.attrs[name] = _parse_attr(text, specs[name].type)
            else:
                node.operands.append(self._operand(item))
        names = [n.strip().lstrip("%") for n in match[1].split(",")]
        for name, (kind, precision) in zip(names, _RESULT.findall(match[4]), strict=True):
            value = self._define(name, TensorType.parse(kind), node)
            value.precision = DType(precision) if precision else None
            node.results.append(value)
        self.graph.nodes.append(node)


def _decode(text: str, kind: TensorType) -> npt.NDArray[np.generic]:
    shape = [d for d in kind.shape if not isinstance(d, SymDim)]
    flat = np.frombuffer(base64.b64decode(text), NUMPY_DTYPE[kind.dtype])
    return flat.reshape(shape)
