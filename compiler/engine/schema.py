"""JSON with exactly one byte form per value, and typed dataclasses read back from it.

`encode` sorts keys, writes floats in Python's shortest round-trip form, refuses NaN and infinity,
and ends with a newline: equal values give equal bytes, so the files can be hashed. `decode` checks
every field against the dataclass's type hints and names the field that is wrong.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import numbers
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")
Reader = Callable[[object], Any]


class SchemaError(ValueError):
    """A value that does not fit its declared type; `path` leads to it, outermost name first."""

    def __init__(self, what: str, path: tuple[str, ...] = ()) -> None:
        super().__init__(f"{'.'.join(path)}: {what}" if path else what)
        self.what = what
        self.path = path

    def within(self, name: str) -> SchemaError:
        """The same error seen from one level further out."""
        return SchemaError(self.what, (name, *self.path))


def encode(value: object) -> bytes:
    """Canonical UTF-8 JSON of a dataclass or of plain data.

    Raises:
        SchemaError: for NaN, infinity, or something that JSON cannot hold.
    """
    text = json.dumps(plain(value), sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def plain(value: object) -> object:
    """Dataclasses, tuples and numpy scalars as dict, list, int, float, str, bool or None."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _finite(float(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {name: _plain_in(name, item) for name, item in pairs}
    if isinstance(value, Mapping):
        return {_key(name): _plain_in(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_in(str(i), item) for i, item in enumerate(value)]
    raise SchemaError(f"a {type(value).__name__} cannot be written as JSON")


def decode(kind: type[T], data: object) -> T:
    """The dataclass `kind` from plain JSON data (what `parse` returns).

    Raises:
        SchemaError: an unknown or missing field, or a value of the wrong type.
    """
    return decoder(kind)(data)


def decoder(kind: type[T]) -> Callable[[object], T]:
    """`decode` for one kind, made ready: reading type hints takes longer than most decoding."""
    return typing.cast(Callable[[object], T], _reader(typing.cast(Any, kind)))


def parse(text: bytes) -> object:
    """Plain JSON data; duplicate keys, NaN and infinity are errors (`SchemaError`)."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        if isinstance(error, SchemaError):
            raise
        raise SchemaError(f"not valid JSON ({error})") from None


def _plain_in(name: str, value: object) -> object:
    try:
        return plain(value)
    except SchemaError as error:
        raise error.within(name) from None


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise SchemaError(f"the key {name!r} is not a string")
    return name


def _finite(value: float) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise SchemaError(f"{value} cannot be written as JSON")
    return value


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise SchemaError(f"the key {next(n for n in names if names.count(n) > 1)!r} stands twice")
    return result


def _no_constant(name: str) -> object:
    raise SchemaError(f"{name} is not a JSON number")


@functools.cache
def _reader(kind: Any) -> Reader:
    """The function that checks one value of type `kind`; built once per type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is object:
        return lambda value: value
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast(type[Any], kind))
    if origin is tuple:
        return _list_reader(_reader(arguments[0]))
    if origin is not None and _is_subclass(origin, Mapping):
        return _mapping_reader(_reader(arguments[1]))
    if origin is typing.Literal:
        return _choice_reader(arguments)
    if origin in (typing.Union, types.UnionType):
        return _optional_reader(_reader(next(a for a in arguments if a is not types.NoneType)))
    return _scalar_reader(kind)


def _is_subclass(kind: object, parent: type) -> bool:
    """`issubclass` that says False for things that are no classes."""
    return isinstance(kind, type) and issubclass(kind, parent)


def _dataclass_reader(kind: type[Any]) -> Reader:
    hints = typing.get_type_hints(kind)
    fields = {f.name: _reader(hints[f.name]) for f in dataclasses.fields(kind)}
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }

    def check_names(found: Collection[str]) -> None:
        for name in sorted(set(found) - fields.keys()):
            near = difflib.get_close_matches(name, fields, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise SchemaError(f"unknown field {name!r}{hint}")
        for name in sorted(required - set(found)):
            raise SchemaError(f"the field {name!r} is missing")

    def read(value: object) -> Any:
        items = _expect(value, dict, "an object")
        if items.keys() != fields.keys():
            check_names(items)
        return kind(**_read_items(items, fields.__getitem__))

    return read


def _list_reader(item: Reader) -> Reader:
    def read(value: object) -> Any:
        items = _expect(value, list, "a list")
        result: list[object] = []
        try:
            result.extend(map(item, items))
        except SchemaError as error:
            raise error.within(str(len(result))) from None
        return tuple(result)

    return read


def _mapping_reader(item: Reader) -> Reader:
    def read(value: object) -> Any:
        return _read_items(_expect(value, dict, "an object"), lambda _: item)

    return read


def _read_items(items: dict[str, object], reader: Callable[[str], Reader]) -> dict[str, Any]:
    """Every value read by its name's reader; one handler for all, as opening must be fast."""
    result, name = {}, ""
    try:
        for name, value in items.items():
            result[name] = reader(name)(value)
    except SchemaError as error:
        raise error.within(name) from None
    return result


def _choice_reader(choices: tuple[object, ...]) -> Reader:
    def read(value: object) -> Any:
        if value not in choices:
            raise SchemaError(f"{value!r} is not one of {', '.join(map(repr, choices))}")
        return value

    return read


def _optional_reader(inner: Reader) -> Reader:
    return lambda value: None if value is None else inner(value)


def _scalar_reader(kind: type[Any]) -> Reader:
    def read(value: object) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if type(value) is not kind:
            raise SchemaError(f"expected {kind.__name__}, found {type(value).__name__} {value!r}")
        return value

    return read


def _expect(value: object, kind: type[Any], words: str) -> Any:
    if not isinstance(value, kind):
        raise SchemaError(f"expected {words}, found {type(value).__name__}")
    return value
