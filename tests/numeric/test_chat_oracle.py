"""Prompt text and token ids against transformers' own tokenizer on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spikeinfer import SpikeError
from spikeinfer.runtime.chat import ChatTemplate
from spikeinfer.runtime.text_codec import TextCodec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer

CHATML = """{% for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}
    {%- endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}"""
TOOLS = """{{ bos_token }}{% set ns = namespace(n=0) %}
{%- for message in messages %}
    {%- if message.tool_calls is defined %}{% continue %}{% endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- if ns.n > 3 %}{% break %}{% endif %}
    {%- generation %}[{{ message.role }}]{{ message.content }}{% endgeneration %}
    {{- message.thinking }}
{%- endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- if documents %}{{ documents | length }}{% endif %}
{{ dict(a=mode) | tojson }} {{ strftime_now("%Y") | length }} {{ eos_token }}"""
REFUSES = "{{ raise_exception('Roles must alternate') if messages[0].role != 'user' }}ok"

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  Hello <b>&amp; you</b>  "}],
    [
        {"role": "system", "content": "é€😀"},
        {"role": "user", "content": "2 + 3", "name": None},
        {"role": "assistant", "content": "5", "reasoning": "add", "tool_calls": None},
        {"role": "user", "content": "</s><|im_end|> 日本"},
        {"role": "user", "content": "fifth"},
    ],
]
SCHEMAS = [{"type": "function", "function": {"name": "f", "description": "a < b & 'c'"}}]


def write_tokenizer(directory: Path, **config: Any) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if config.pop("template_post_processor", False):
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    tokenizer.enable_truncation(5)
    tokenizer.save(str(directory / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    values |= {"eos_token": {"__type": "AddedToken", "content": "</s>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(values))


def open_both(directory: Path) -> tuple[Any, TextCodec, ChatTemplate | None]:
    codec = TextCodec.open(directory)
    assert codec is not None
    oracle = AutoTokenizer.from_pretrained(directory)
    return oracle, codec, ChatTemplate.open(directory, codec.special_tokens)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("place", ["config", "list", "file"])
def test_prompt_text_and_ids(
    tmp_path: Path, template: str, chat: list[dict[str, Any]], prompt: bool, place: str
) -> None:
    kinds = {"config": template, "list": [{"name": "default", "template": template}]}
    write_tokenizer(tmp_path, chat_template=kinds.get(place, "overridden by the file"))
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    oracle, codec, ours = open_both(tmp_path)
    assert ours is not None
    options: dict[str, Any] = {"tools": SCHEMAS, "documents": None, "mode": "x"}
    expected = oracle.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=prompt, **options
    )
    text = ours.render(chat, add_generation_prompt=prompt, **options)
    assert text == expected
    ids = oracle.apply_chat_template(
        chat, add_generation_prompt=prompt, return_dict=False, **options
    )
    assert codec.encode(text, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"template_post_processor": True},
        {"add_bos_token": True},
        {"add_bos_token": False, "template_post_processor": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_eos_token": True, "template_post_processor": True},
        {"add_bos_token": True, "bos_token": None},
    ],
)
def test_plain_prompts_get_the_tokenizers_own_bos_and_eos(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    write_tokenizer(tmp_path, **config)
    oracle, codec, template = open_both(tmp_path)
    assert template is None
    text = "é and a longer text than the truncation of the file </s>"
    assert codec.encode(text) == oracle(text)["input_ids"]
    ids = [*codec.encode(text), codec._tokenizer.token_to_id("<|im_end|>")]
    assert codec.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
    assert codec.eos_ids == {oracle.eos_token_id}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (REFUSES, "Roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{% set ns = namespace(__init__=1) %}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_template_that_fails_is_a_users_error(template: str, words: str) -> None:
    with pytest.raises(SpikeError, match=words) as caught:
        ChatTemplate(template, {}).render([{"role": "system", "content": "x"}])
    assert caught.value.code == "SPK612"
