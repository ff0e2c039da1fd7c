"""From what a caller gives (text, ids, messages, options) to a checked request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeGuard, cast

import numpy as np

from ..errors import SpikeError
from .chat import Message
from .grammar import GrammarState
from .loading import LoadedEngine
from .prompt_lookup import PromptLookup
from .qos import QOS, Qos
from .sampling_params import SamplingParams, Speculative
from .sequence import Request
from .text_codec import TextCodec

Prompt = str | Sequence[int] | Sequence[Message]

# More than a detokenizer looks back, special tokens among them or not.
CONTEXT_IDS = 32


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of a request; `SamplingParams` says what they mean."""

    max_tokens: int | None
    temperature: float
    max_entropy: float | None
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    mirostat_tau: float | None
    mirostat_eta: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    prompt_logprobs: int | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    grammar: str | None
    speculative: Speculative


class RequestOptions(SamplingOptions, total=False):
    """Sampling options, and how to read the prompt.

    Attributes:
        chat: put the prompt (a user's text or a list of messages) through the chat template.
        template_variables: for the template: ``tools``, ``enable_thinking`` ...
        priority: class of service, ``realtime``, ``interactive`` (default) or ``batch``.
        cache_salt: prefixes are shared with requests of the same salt only.
    """

    chat: bool
    template_variables: Mapping[str, Any]
    priority: Qos
    cache_salt: str


def make_request(engine: LoadedEngine, prompt: Prompt, options: RequestOptions) -> Request:
    """Check everything that can be checked before a step is run.

    Raises:
        SpikeError: SPK605, 606, 607, 608, 611, 612, 625, 626 as in `SpikeEngine.stream`.
    """
    rest = dict(options)
    chat = bool(rest.pop("chat", False))
    variables = cast("Mapping[str, Any]", rest.pop("template_variables", {}))
    qos, salt = _service(rest.pop("priority", "interactive"), rest.pop("cache_salt", ""))
    params = SamplingParams(**cast(SamplingOptions, rest))
    limits, codec = engine.session.limits, engine.codec
    if params.logit_bias:
        checked_ids(list(params.logit_bias), limits.vocab_size, "logit_bias")
    ids = checked_ids(prompt_ids(engine, prompt, chat, variables), limits.vocab_size)
    if len(ids) >= limits.max_seq_len:
        raise too_long(len(ids), limits.max_seq_len, "to be continued by at least one token")
    if params.stop_strings:
        require_codec(engine, "stop strings")
    # A chat answer is a text of its own; anything else continues the prompt's text.
    context = () if chat else ids[-CONTEXT_IDS:]
    detokenizer = codec.detokenizer(context) if codec else None
    grammar, lookup = _start_grammar(engine, params), PromptLookup.start(params, limits)
    return Request(
        ids, params, limits.max_seq_len, engine.eos_ids, detokenizer, qos, salt, grammar, lookup
    )


def _start_grammar(engine: LoadedEngine, params: SamplingParams) -> GrammarState | None:
    if not params.structured:
        return None
    require_codec(engine, "structured output")
    assert engine.grammars is not None  # there is a tokenizer
    return engine.grammars.start(params)


def _service(priority: object, salt: object) -> tuple[Qos, str]:
    if priority not in QOS:
        raise SpikeError(
            "SPK608",
            "priority",
            f"priority={priority!r} is none.",
            f"Give one of {', '.join(QOS)}.",
        )
    if not _is_text(salt):
        raise SpikeError("SPK608", "cache_salt", f"cache_salt={salt!r} is no text.", "Give a str.")
    return priority, salt


def prompt_ids(
    engine: LoadedEngine, prompt: Prompt, chat: bool, variables: Mapping[str, Any]
) -> Sequence[int]:
    """Token ids of a prompt: with the tokenizer's BOS for a text, as they are for ids and chats."""
    if chat:
        codec = require_codec(engine, "chat=True")
        text = checked_text(_chat_text(engine, prompt, variables))
        return codec.encode(text, add_special_tokens=False)
    if isinstance(prompt, str):
        return require_codec(engine, "a text prompt").encode(checked_text(prompt))
    return cast("Sequence[int]", prompt)


def checked_text(text: str) -> str:
    """The text, if it is one that UTF-8 can hold; SpikeError SPK607 otherwise."""
    if not _is_text(text):
        raise _no_prompt(text)
    return text


def _is_text(value: object) -> TypeGuard[str]:
    """Whether it is a str without halves of surrogate pairs, which UTF-8 can't hold."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_prompt(given: object) -> SpikeError:
    return SpikeError(
        "SPK607",
        "prompt",
        f"expected text or a list of token ids, found {type(given).__name__} {ascii(given)[:60]}.",
        "Pass a str without lone surrogates, a list of ids, or messages with chat=True.",
    )


def checked_ids(ids: Sequence[int], vocab_size: int, where: str = "prompt") -> list[int]:
    """`ids` as plain ints.

    Raises:
        SpikeError: SPK605, there are none; SPK607, one is no id of this model.
    """
    if not isinstance(ids, Sequence | np.ndarray):
        raise _no_prompt(ids)
    try:
        values = np.asarray(ids)
    except (ValueError, OverflowError):  # ragged, or ids of more than 64 bits
        raise _no_prompt(ids) from None
    if values.size == 0:
        raise SpikeError(
            "SPK605", "prompt", "the prompt has no tokens.", "Give at least one token."
        )
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise SpikeError(
            "SPK607",
            "prompt",
            f"expected text or a list of token ids, found {type(ids[0]).__name__} entries.",
            "Pass messages with chat=True.",
        )
    outside = values[(values < 0) | (values >= vocab_size)]
    if outside.size:
        raise SpikeError(
            "SPK607",
            where,
            f"token id {outside[0]} is outside this model's vocabulary of {vocab_size}.",
            "Take the ids from the tokenizer of the same checkpoint.",
        )
    return cast("list[int]", values.tolist())


def require_codec(engine: LoadedEngine, what: str) -> TextCodec:
    """The engine's tokenizer; SpikeError SPK611 when it was built without."""
    if engine.codec is None:
        raise SpikeError(
            "SPK611",
            "tokenizer",
            f"{what} needs a tokenizer, and this engine was built without tokenizer files.",
            "Pass token ids and read `complete(...).token_ids`, or build it from a checkpoint "
            "with a tokenizer.json.",
        )
    return engine.codec


def too_long(tokens: int, capacity: int, purpose: str) -> SpikeError:
    """The error for a prompt that does not fit: SPK606."""
    return SpikeError(
        "SPK606",
        "prompt",
        f"the prompt has {tokens} tokens, too many {purpose}: the capacity is {capacity} tokens, "
        "prompt and output together.",
        "Shorten the prompt or build the engine with a larger --max-seq-len.",
    )


def _chat_text(engine: LoadedEngine, prompt: Prompt, variables: Mapping[str, Any]) -> str:
    if engine.template is None:
        raise SpikeError(
            "SPK611",
            "chat template",
            "this model has no chat template (a base model, usually).",
            "Send a plain prompt without chat=True.",
        )
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise _no_prompt(prompt)
    return engine.template.render(cast("Sequence[Message]", messages), **variables)
