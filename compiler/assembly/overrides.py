"""Formats that a user settles by name, role or layer, over the mix's rules and the solver's choice.

    Override("q6_k", match="*.down_proj.weight", layers="0-3")     # all conditions must hold
    Override("q8_0", match="/layers\\.(0|29)\\./")                   # between slashes: a regex
    Override("f16", role="attn_v")

The first override that holds for a matrix decides. A format whose blocks don't fit the rows is
replaced as in a mix, and the plan says so. Matrices that a mix never quantises (routers, learned
positions) only listen to an override that names their role.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from typing import TYPE_CHECKING

from ...errors import ExitCode, SpikeError
from ...kernels import FORMATS
from ..quantize import Given, Role
from ..quantize.int4 import INT4_SYM
from ..quantize.policy import SHORT, fitting
from ..quantize.roles import UNQUANTIZED

if TYPE_CHECKING:  # the command line reads recipes without torch
    from ..ir import Constant

CONDITIONS = ("match", "role", "layers")
KNOWN = (*FORMATS, INT4_SYM, *SHORT)
ROLES = tuple(role.value for role in Role)


@dataclass(frozen=True)
class Override:
    """One rule of a recipe's `formats`; at least one of the conditions.

    Args:
        format: storage format, as in docs/storage-formats.md; ``q4_k_short`` and its like have a
            short last block where the rows need one.
        match: glob over the whole parameter name, or /regex/ found anywhere in it.
        role: of the matrix, such as ``attn_v``.
        layers: ``3``, ``0-3`` or ``0-3,28-29``: indices of decoder layers.
        place: file and line that say so, for messages.

    Raises:
        SpikeError: SPK820 for a value that means nothing, with the nearest one that does.
    """

    format: str
    match: str = ""
    role: str = ""
    layers: str = ""
    place: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.format not in KNOWN:
            raise _unknown("format", self.format, KNOWN)
        if self.role and self.role not in ROLES:
            raise _unknown("role", self.role, ROLES)
        if not any(getattr(self, name) for name in CONDITIONS):
            raise _bad("an override has no condition", f"Give it one of {', '.join(CONDITIONS)}.")
        self._pattern()
        self._ranges()

    def __str__(self) -> str:
        given = [f"{name} {getattr(self, name)}" for name in CONDITIONS if getattr(self, name)]
        return ", ".join(given)

    def to_json(self) -> dict[str, str]:
        """What was given, for the manifest."""
        given = {name: getattr(self, name) for name in ("format", *CONDITIONS)}
        return {name: value for name, value in given.items() if value}

    def holds(self, parameter: str, role: str, layer: int | None) -> bool:
        """Whether all conditions hold for a matrix."""
        if role in UNQUANTIZED and not self.role:
            return False
        inside = layer is not None and any(a <= layer <= b for a, b in self._ranges())
        return (
            (not self.match or self._pattern().search(parameter) is not None)
            and (not self.role or self.role == role)
            and (not self.layers or inside)
        )

    def _pattern(self) -> re.Pattern[str]:
        """As searched for: a glob covers the whole name."""
        text = self.match
        regex = text[1:-1] if _is_regex(text) else rf"\A{translate(text)}"
        try:
            return re.compile(regex)
        except re.error as error:
            what = f"match {text} is no regular expression: {error}"
            raise _bad(what, "Correct it, or write a glob without slashes.") from error

    def _ranges(self) -> list[tuple[int, int]]:
        """First and last layer of each part."""
        parts = [part.partition("-") for part in self.layers.split(",")] if self.layers else []
        try:
            ranges = [(int(a), int(b if dash else a)) for a, dash, b in parts]
        except ValueError:
            ranges = [(1, 0)]
        if any(first > last or first < 0 for first, last in ranges):
            what = f"layers {self.layers!r} is no range"
            raise _bad(what, "Write 3, 0-3, or 0-3,28-29.")
        return ranges


class Overrides:
    """The overrides of a build as its settled formats; knows afterwards which matched nothing."""

    def __init__(self, overrides: Sequence[Override]) -> None:
        self.overrides = tuple(overrides)
        self._seen: dict[str, tuple[str, int | None]] = {}

    def __call__(self, matrix: Constant) -> Given | None:
        """The format of the first override that holds for the matrix, None if none does."""
        assert matrix.parameter is not None
        key = matrix.parameter, matrix.role, layer_of(matrix.parameter)
        self._seen[matrix.name] = key[1:]
        k = matrix.shape[-1]
        assert isinstance(k, int)
        for override in self.overrides:
            if override.holds(*key):
                format, fallback = fitting(override.format, k)
                return Given(format, f"override: {override}", fallback)
        return None

    def check(self) -> None:
        """Raises SPK421 if an override held for none of the matrices asked about."""
        matrices = [(name, *rest) for name, rest in self._seen.items()]
        for override in self.overrides:
            if not any(override.holds(*matrix) for matrix in matrices):
                raise self._useless(override)

    def _useless(self, override: Override) -> SpikeError:
        names, roles = sorted(self._seen), sorted({role for role, _ in self._seen.values()})
        layers = [layer for _, layer in self._seen.values() if layer is not None]
        hints = []
        if override.match:
            text = override.match[1:-1] if _is_regex(override.match) else override.match
            near = difflib.get_close_matches(text, names, 1, 0)
            hints.append(f"The nearest name is {near[0]}." if near else "")
        if override.role and override.role not in roles:
            hints.append(f"The model's roles are {', '.join(roles)}.")
        if override.layers and layers:
            hints.append(f"Its layers are 0-{max(layers)}.")
        place = f"{override.place}: " if override.place else ""
        what = f"{place}the override of {override} matches none of the {len(names)} matrices."
        return SpikeError("SPK421", "quantization", what, " ".join(hints) or "Remove it.")


def layer_of(parameter: str) -> int | None:
    """Index of the decoder layer: the first number in a parameter's name, None without one."""
    return next((int(part) for part in parameter.split(".") if part.isdecimal()), None)


def first_given(*sources: Callable[[Constant], Given | None]) -> Callable[[Constant], Given | None]:
    """What the first source that has an answer says."""

    def given(matrix: Constant) -> Given | None:
        answers = (source(matrix) for source in sources)
        return next((answer for answer in answers if answer is not None), None)

    return given


def _is_regex(text: str) -> bool:
    return len(text) > 2 and text.startswith("/") and text.endswith("/")


def _unknown(kind: str, value: str, known: Iterable[str]) -> SpikeError:
    near = difflib.get_close_matches(value.lower(), list(known), 1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return _bad(f"there is no {kind} {value!r}", f"{hint}Known: {', '.join(known)}.")


def _bad(what: str, remedy: str) -> SpikeError:
    return SpikeError("SPK820", "recipe", f"{what}.", remedy, ExitCode.BAD_INPUT)
