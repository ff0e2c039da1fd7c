"""Canonical JSON: one byte form per value; reading names the field that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spikeinfer.compiler.engine.schema import SchemaError, decode, encode, parse


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Whole:
    kind: Literal["a", "b"]
    share: float
    flag: bool
    parts: tuple[Part, ...] = ()
    named: Mapping[str, Part] = field(default_factory=dict)
    maybe: int | None = None
    free: object = None


names = st.text(max_size=8)
parts = st.builds(Part, names, st.lists(st.integers()).map(tuple))
wholes = st.builds(
    Whole,
    st.sampled_from(["a", "b"]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.lists(parts, max_size=3).map(tuple),
    st.dictionaries(names, parts, max_size=3),
    st.none() | st.integers(),
    st.lists(st.integers() | names, max_size=3),
)


@given(wholes)
def test_every_value_comes_back_and_has_one_byte_form(value: Whole) -> None:
    text = encode(value)
    back = decode(Whole, parse(text))
    assert back == value
    assert encode(back) == text


def test_key_order_does_not_matter() -> None:
    assert encode({"b": 1, "a": (2, 3.0)}) == encode({"a": [2, 3.0], "b": 1})


def test_numpy_scalars_are_numbers() -> None:
    assert encode([np.float64(0.1), np.int32(7)]) == encode([0.1, 7])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kind":"a","share":1,"flag":true,"parts":[{"name":"x"},{"name":3}]}',
         r"^parts\.1\.name: expected str, found int 3$"),
        ('{"kind":"a","share":1,"flag":true,"named":{"q":{"nam":"x"}}}',
         r"^named\.q: unknown field 'nam' \(did you mean 'name'\?\)$"),
        ('{"kind":"c","share":1,"flag":true}', r"^kind: 'c' is not one of 'a', 'b'$"),
        ('{"kind":"a","share":1,"flag":1}', "^flag: expected bool, found int 1$"),
        ('{"kind":"a","share":true,"flag":true}', "^share: expected float, found bool True$"),
        ('{"kind":"a","flag":true}', "^the field 'share' is missing$"),
        ('{"kind":"a","share":1,"flag":true,"parts":{}}', "^parts: expected a list, found dict$"),
        ("[]", "^expected an object, found list$"),
    ],
)  # fmt: skip
def test_the_wrong_field_is_named(text: str, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        decode(Whole, parse(text.encode()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"a":1,"a":2}', "'a' stands twice"),
        (b"[NaN]", "NaN is not a JSON number"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_what_is_not_json(text: bytes, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        parse(text)


@pytest.mark.parametrize("value", [{"a": [1.0, float("nan")]}, {"a": [0, float("inf")]}])
def test_no_value_without_a_json_form_is_written(value: object) -> None:
    with pytest.raises(SchemaError, match=r"a\.1"):
        encode(value)


def test_things_that_json_cannot_hold() -> None:
    with pytest.raises(SchemaError, match=r"^a: a set cannot be written"):
        encode({"a": {1}})
    with pytest.raises(SchemaError, match="key 1 is not a string"):
        encode({1: 2})
