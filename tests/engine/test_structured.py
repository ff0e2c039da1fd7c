"""Structured output over real tokenizers and logits that mean nothing: the text always parses."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikeinfer import SpikeError
from spikeinfer.runtime.loading import LoadedEngine
from spikeinfer.runtime.loop import BatchLoop
from spikeinfer.runtime.prompts import RequestOptions, make_request
from spikeinfer.runtime.sequence import Completion
from spikeinfer.runtime.session import BestLogits, SessionLimits, StepInputs, best_of
from spikeinfer.runtime.text_codec import TextCodec

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
VOCABULARIES = {"tiny-llama": 320, "SmolLM2-135M-Instruct": 49_152}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["person", "company"]},
        "marks": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 3,
        },
        "alive": {"type": ["boolean", "null"]},
    },
    "required": ["name", "age", "kind", "marks", "alive"],
    "additionalProperties": False,
}
SUM = 'start: number (("+" | "-") number){0,9}\nnumber: /[0-9]{1,4}/\n'
SUM_GBNF = 'root ::= number more? more? more?\nmore ::= ("+" | "-") number\nnumber ::= [0-9]{1,4}\n'


class RandomSession:
    """Logits from the tokens just before, flat enough to try everything."""

    def __init__(self, vocab_size: int) -> None:
        self.limits = SessionLimits(vocab_size, 256, 16, 1024, 1024, 16)
        self.blocks = None
        self.tokens = 0

    def step(self, inputs: StepInputs) -> np.ndarray:
        self.tokens += inputs.tokens.size
        keys = [(int(inputs.tokens[t]), int(inputs.positions[t])) for t in inputs.logit_rows]
        rows = [np.random.default_rng(key).normal(0, 3, self.limits.vocab_size) for key in keys]
        return np.array(rows, np.float32).reshape(len(keys), -1)

    def best(self, inputs: StepInputs) -> BestLogits:
        return best_of(self.step(inputs))

    def close(self) -> None:
        pass


@pytest.fixture(params=VOCABULARIES, scope="module")
def engine(request: pytest.FixtureRequest) -> LoadedEngine:
    codec = TextCodec.open(MODELS / request.param)
    assert codec is not None
    session = RandomSession(VOCABULARIES[request.param])
    return LoadedEngine(session, codec, eos_ids=codec.eos_ids)


def run(engine: LoadedEngine, prompts: list[str], **options: Any) -> list[Completion]:
    loop, requests = BatchLoop(engine.session), []
    given: RequestOptions = {"temperature": 1.0, "max_tokens": 400, **options}
    for seed, prompt in enumerate(prompts):
        requests.append(make_request(engine, prompt, {"seed": seed, **given}))
        loop.add(requests[-1])
    while not loop.idle:
        loop.step()
    return [request.completion() for request in requests]


def require_person(text: str) -> None:
    value = json.loads(text)
    assert list(value) == PERSON["required"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 150
    assert isinstance(value["age"], int)
    assert value["kind"] in ("person", "company")
    assert len(value["marks"]) <= 3
    assert all(isinstance(mark, int) and 0 <= mark <= 99 for mark in value["marks"])
    assert value["alive"] in (True, False, None)


@pytest.mark.parametrize("form", [dict, json.dumps], ids=["mapping", "text"])
def test_json_always_follows_its_schema(engine: LoadedEngine, form: Any) -> None:
    prompts = [f"{i}: " for i in range(6)]
    for done in run(engine, prompts, json_schema=form(PERSON)):
        assert done.finish_reason == "stop"
        require_person(done.text)


def test_forced_tokens_need_no_step(engine: LoadedEngine) -> None:
    """The same answer with log probabilities, which are for tokens that the model was asked for."""
    schema = {"enum": ["a rather long constant text", "another rather long constant"]}
    session = engine.session
    assert isinstance(session, RandomSession)
    codec = engine.codec
    assert codec is not None
    counts = []
    for options in ({}, {"logprobs": 0}):
        before = session.tokens
        done = run(engine, ["x"], json_schema=schema, temperature=0.0, **options)[0]
        assert json.loads(done.text) in schema["enum"]
        assert done.finish_reason == "stop"
        counts.append((session.tokens - before, len(done.token_ids)))
    prompt = len(codec.encode("x"))
    (computed, generated), (_, asked) = counts
    # The last tokens are forced: they are never computed at all.
    assert computed - prompt < generated - 3
    assert asked >= generated  # letter by letter or not, but each from its own step


def test_forced_tokens_at_the_beginning_do_not_stretch_the_spans(engine: LoadedEngine) -> None:
    """Queue, prefill and decode follow each other; the first ends with the model's own choice."""
    schema = {"type": "object", "properties": {"rather_long_name": {"type": "boolean"}},
              "required": ["rather_long_name"], "additionalProperties": False}  # fmt: skip
    begun = time.perf_counter()
    timings = run(engine, ["x"], json_schema=schema)[0].timings
    whole = time.perf_counter() - begun
    assert timings.tokens[0] == 0 < timings.tokens[-1]  # forced, chosen
    assert timings.prefill > 0
    assert timings.queue + timings.prefill + timings.decode <= whole
    assert timings.queue + timings.prefill == pytest.approx(min(filter(None, timings.tokens)))


def test_a_batch_gives_what_each_gives_alone(engine: LoadedEngine) -> None:
    prompts = ["a", "bc", "def gh", "i"]
    options = {"json_schema": PERSON, "top_p": 0.9, "seed": 5}
    together = run(engine, prompts, **options)
    alone = [run(engine, [prompt], **options)[0] for prompt in prompts]
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ({"regex": r"(yes|no), because [a-z ]{3,20}\."}, r"(yes|no), because [a-z ]{3,20}\."),
        ({"grammar": SUM}, r"\d{1,4}([+-]\d{1,4}){0,9}"),
        ({"grammar": SUM_GBNF}, r"\d{1,4}([+-]\d{1,4}){0,3}"),
    ],
    ids=["regex", "lark", "gbnf"],
)
def test_the_text_matches(engine: LoadedEngine, option: dict[str, str], pattern: str) -> None:
    for done in run(engine, ["1", "2", "3"], **option):
        assert done.finish_reason == "stop"
        assert re.fullmatch(pattern, done.text)


def test_a_text_that_is_forced_wholly_runs_no_step(engine: LoadedEngine) -> None:
    session = engine.session
    assert isinstance(session, RandomSession)
    before = session.tokens
    request = make_request(engine, "say", {"regex": "nothing else"})
    assert request.finish_reason == "stop"
    assert request.completion().text == "nothing else"
    assert session.tokens == before
    cut = make_request(engine, "say", {"regex": "nothing else", "max_tokens": 1}).completion()
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 1)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"json_schema": {"type": "objekt"}}, "objekt"),
        ({"json_schema": '{"type": '}, ""),
        ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"regex": "(ab"}, "unclosed group"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": "root ::= ("}, ""),
    ],
    ids=str,
)
def test_a_bad_grammar_is_one_error_before_anything_runs(
    engine: LoadedEngine, option: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpikeError, match=f"SPK625 .*{words}") as caught:
        make_request(engine, "x", option)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "option",
    [{"regex": "a", "grammar": SUM}, {"json_schema": 3}, {"regex": b"a"}, {"grammar": ["a"]}],
    ids=str,
)
def test_options_that_are_no_grammars(engine: LoadedEngine, option: Any) -> None:
    with pytest.raises(SpikeError, match="SPK608"):
        make_request(engine, "x", option)


def test_without_the_package_the_error_says_what_to_install(
    engine: LoadedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(SpikeError, match=r"SPK626 .*pip install 'spikeinfer\[structured\]'"):
        make_request(engine, "x", {"regex": "a"})


def test_without_a_tokenizer_there_is_no_structure(engine: LoadedEngine) -> None:
    with pytest.raises(SpikeError, match="SPK611"):
        make_request(LoadedEngine(engine.session), [1], {"regex": "a"})


def test_a_nan_is_not_hidden_by_the_grammar(engine: LoadedEngine) -> None:
    request = make_request(engine, "x", {"regex": "[ab]"})
    row = np.zeros(engine.session.limits.vocab_size, np.float32)
    row[-1] = np.nan
    with pytest.raises(SpikeError, match="SPK609"):
        request.sampler.adjusted(row)
