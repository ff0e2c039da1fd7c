"""Chat templates: messages to the prompt text the model was trained on.

The environment is that of transformers (`utils/chat_template_utils.py`): an immutable sandbox,
because a template comes from whoever made the checkpoint; `tests/numeric/test_chat_oracle.py`
compares with it.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import SpikeError
from .text_codec import TOKENIZER_CONFIG_FILE, read_json

Message = Mapping[str, Any]
TEMPLATE_FILE = "chat_template.jinja"
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A template, compiled when the first conversation needs it: plain prompts never do.

    Args:
        source: jinja2 text.
        special_tokens: variables such as ``bos_token`` that every rendering sees.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _template(self) -> jinja2.Template:
        try:
            return _environment().from_string(self._source)
        except jinja2.TemplateError as error:
            raise _template_error(error) from error

    @classmethod
    def open(cls, directory: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """The template of an engine or checkpoint: chat_template.jinja, or tokenizer_config.json's.

        Raises:
            SpikeError: SPK612, the file isn't UTF-8.
        """
        path = directory / TEMPLATE_FILE
        if path.is_file():
            try:
                return cls(path.read_text("utf-8"), special_tokens)
            except UnicodeDecodeError as error:
                raise _template_error(error) from error
        source = _default_template(read_json(directory / TOKENIZER_CONFIG_FILE))
        return None if source is None else cls(source, special_tokens)

    def check(self) -> None:
        """Compiles the template now. Raises SpikeError SPK612 if it is no template."""
        _ = self._template

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens again.

        Args:
            messages: mappings with ``role`` and ``content``; keys with None are left out.
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of functions the model may call.
            variables: what else the template knows (``enable_thinking`` ...).

        Raises:
            SpikeError: SPK612, the template does not compile, refused these messages or failed.
        """
        values = {**self._special_tokens, **_plain(variables)}
        template = self._template
        try:
            return template.render(
                messages=[_normalised(message) for message in messages],
                tools=_plain(tools),
                documents=_plain(values.pop("documents", None)),
                add_generation_prompt=add_generation_prompt,
                **values,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise _template_error(error) from error


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class _Namespace(jinja2.utils.Namespace):
    """jinja's namespace without underscore names, which could reach the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As jinja does it: `self` stays free as a name for the template's own attributes.
        self, *rest = args
        for name in dict(*rest, **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, *rest, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationBlock, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without jinja's escaping of HTML characters: a prompt is not a web page."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not store the name {name!r}")


def _default_template(config: Mapping[str, Any]) -> str | None:
    """``chat_template`` of tokenizer_config.json: a string, or a list of named ones."""
    value = config.get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict)]
        value = next((e.get("template") for e in entries if e.get("name") == "default"), None)
    return value if isinstance(value, str) else None


def _normalised(message: Message) -> dict[str, Any]:
    """Plain data, without None, with the reasoning under every name that templates read."""
    plain: dict[str, Any] = {k: v for k, v in _plain(message).items() if v is not None}
    reasoning = next((plain[name] for name in REASONING_FIELDS if name in plain), None)
    if reasoning is None:
        return plain
    return {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Only JSON types reach the template: methods of richer objects are none of its business."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a {type(value).__name__} can't be used in a chat message")


def _template_error(error: Exception) -> SpikeError:
    return SpikeError(
        "SPK612",
        "chat template",
        f"{type(error).__name__}: {error}",
        "Check the roles and fields of the messages against the model's card, "
        "or send a finished prompt without chat=True.",
    )
