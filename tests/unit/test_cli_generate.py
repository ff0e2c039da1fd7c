"""`spike run` over a fake engine: streaming, Ctrl-C, conversations."""

from __future__ import annotations

import dataclasses
import inspect
import io
import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from spikeinfer import SamplingParams, SpikeError
from spikeinfer.cli import run_engine
from spikeinfer.console import chat, generate
from spikeinfer.console.generate import Ask
from spikeinfer.console.sampling import sampling_options
from spikeinfer.console.terminal import Terminal
from spikeinfer.runtime.logprobs import TokenLogprob
from spikeinfer.runtime.sequence import Completion, Timings

QUIET = Terminal()
TIMES = Timings(0.01, 0.03, 0.2)


class FakeStream:
    """Gives pieces; `before` runs before each (to send a signal, to fail)."""

    def __init__(self, pieces: Sequence[str], before: Callable[[int], None]) -> None:
        self.pieces, self.before = pieces, before
        self.given: list[str] = []
        self.closed = False

    def __iter__(self) -> Iterator[str]:
        for index, piece in enumerate(self.pieces):
            self.before(index)
            self.given.append(piece)
            yield piece

    def __enter__(self) -> FakeStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    @property
    def completion(self) -> Completion:
        ended = len(self.given) == len(self.pieces)
        reason = "stop" if ended else "cancelled"
        return Completion("".join(self.given), list(range(len(self.given))), reason, 7, TIMES)


class FakeEngine:
    """Answers every prompt with the same pieces and remembers what it was asked."""

    has_tokenizer = True

    def __init__(self, *pieces: str, template: bool = True) -> None:
        self.pieces = pieces
        self.has_chat_template = template
        self.before: Callable[[int], None] = lambda index: None
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self.streams: list[FakeStream] = []

    def stream(self, prompt: Any, **options: Any) -> FakeStream:
        self.asked.append((prompt, options))
        self.streams.append(FakeStream(self.pieces, self.before))
        return self.streams[-1]

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs `generate` over a fake engine."""

    def call(engine: FakeEngine, ask: Ask, terminal: Terminal = QUIET) -> int:
        monkeypatch.setattr(generate, "open_engine", lambda *_: engine)
        return generate.generate(Path("E"), ask, {"max_tokens": 9}, {}, terminal)

    return call


def test_flags_are_the_keywords_of_a_request(tmp_path: Path) -> None:
    (tmp_path / "schema").write_text('{"type": "object"}')
    flags = {"engine": Path("E"), "prompt": "p", "top_k": 5, "seed": None, "json": True,
             "logit_bias": ["3=-inf", "7=1.5"], "json_schema": f"@{tmp_path / 'schema'}",
             "speculative": "auto"}  # fmt: skip
    assert sampling_options(flags) == {
        "top_k": 5,
        "logit_bias": {3: float("-inf"), 7: 1.5},
        "json_schema": '{"type": "object"}',
        "speculative": "auto",
    }
    with pytest.raises(SpikeError, match="SPK608"):
        sampling_options({"typical_p": 2.0})
    assert sampling_options({"regex": "a@b"}) == {"regex": "a@b"}


def test_every_flag_of_sampling_is_an_option_of_a_request() -> None:
    names = set(inspect.signature(run_engine).parameters)
    options = {field.name for field in dataclasses.fields(SamplingParams)}
    others = {"engine", "prompt", "chat", "system", "token_ids", "max_seq_len", "threads", "json",
              "log_level"}  # fmt: skip
    assert names - others < options


def test_log_probabilities_are_shown(
    answer: Callable[..., int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [TokenLogprob(7, -0.5, 2, ((3, -0.25), (7, -0.5))), TokenLogprob(9, -1.0, 1)]
    engine, plain = FakeEngine("a", "b"), FakeStream.completion
    engine.has_tokenizer = False
    with_logprobs = property(lambda self: dataclasses.replace(plain.fget(self), logprobs=found))
    monkeypatch.setattr(FakeStream, "completion", with_logprobs)
    answer(engine, Ask("p"))
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert lines[0] == ["token", "logprob", "rank"]
    assert lines[2:4] == [["7", "-0.500", "2", "3", "-0.250", "7", "-0.500"], ["9", "-1.000", "1"]]
    answer(engine, Ask("p"), Terminal(json=True))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["logprobs"][0] == {
        "token_id": 7, "logprob": -0.5, "rank": 2, "top": [[3, -0.25], [7, -0.5]],
    }  # fmt: skip


def test_text_goes_to_stdout_figures_to_stderr(
    answer: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine("Par", "is", ".")
    assert answer(engine, Ask("Where?")) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert err == "[7 prompt tokens, TTFT 40 ms; 3 new tokens, 10.0 tok/s; stop]\n"
    messages = [{"role": "user", "content": "Where?"}]
    assert engine.asked == [(messages, {"max_tokens": 9, "chat": True})]


def test_events(answer: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    answer(FakeEngine("a", "b"), Ask("p"), Terminal(json=True))
    out, err = capsys.readouterr()
    *pieces, last = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert pieces == [{"event": "text", "text": "a"}, {"event": "text", "text": "b"}]
    assert last["event"] == "completion"
    assert (last["text"], last["finish_reason"], last["ttft_seconds"]) == ("ab", "stop", 0.04)


@pytest.mark.parametrize(
    ("ask", "template", "prompt", "chat_used"),
    [
        (Ask("p"), False, "p", False),
        (Ask("p", chat=False), True, "p", False),
        (Ask("p", chat=True, system="s"), True,
         [{"role": "system", "content": "s"}, {"role": "user", "content": "p"}], True),
        (Ask(None, token_ids="3, 1 4"), True, [3, 1, 4], False),
    ],
)  # fmt: skip
def test_how_the_prompt_is_read(
    answer: Callable[..., int], ask: Ask, template: bool, prompt: Any, chat_used: bool
) -> None:
    engine = FakeEngine("x", template=template)
    answer(engine, ask)
    assert engine.asked == [(prompt, {"max_tokens": 9, "chat": chat_used})]


@pytest.mark.parametrize("given", ["-", None])
def test_a_pipe_is_a_prompt(
    answer: Callable[..., int], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    engine = FakeEngine("x", template=False)
    answer(engine, Ask(given))
    assert engine.asked[0][0] == "two\nlines"


def test_a_system_message_needs_a_template(answer: Callable[..., int]) -> None:
    with pytest.raises(SpikeError, match="SPK807"):
        answer(FakeEngine("x", template=False), Ask("p", system="s"))


def test_ids_are_the_answer_without_a_tokenizer(
    answer: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine("", "", template=False)
    engine.has_tokenizer = False
    answer(engine, Ask(None, token_ids="1"))
    assert capsys.readouterr().out == "0 1\n"


def test_ctrl_c_ends_the_answer_after_its_piece(
    answer: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine("a", "b", "c", "d")
    engine.before = lambda index: signal.raise_signal(signal.SIGINT) if index == 1 else None
    handler = signal.getsignal(signal.SIGINT)
    assert answer(engine, Ask("p")) == 130
    out, err = capsys.readouterr()
    assert out == "ab\n"
    assert err.endswith("cancelled]\n")
    assert engine.streams[0].closed
    assert signal.getsignal(signal.SIGINT) is handler


def test_ctrl_c_before_the_first_piece_interrupts(answer: Callable[..., int]) -> None:
    engine = FakeEngine("a")
    engine.before = lambda index: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        answer(engine, Ask("p"))
    assert engine.streams[0].closed


def converse(
    monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, lines: Sequence[str], chat_used: bool
) -> None:
    """A conversation with these lines typed, ended by Ctrl-D."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    chat.converse(engine, {"chat": chat_used}, "be brief", QUIET)  # type: ignore[arg-type]


def test_a_conversation_remembers_until_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine("fine")
    converse(monkeypatch, engine, ["hi", "", "/help", "and you?", "/reset", "again"], True)
    contents = [[m["content"] for m in prompt] for prompt, _ in engine.asked]
    assert contents == [
        ["be brief", "hi"],
        ["be brief", "hi", "fine", "and you?"],
        ["be brief", "again"],
    ]


def test_exit_ends_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine("fine")
    converse(monkeypatch, engine, ["/exit", "hi"], True)
    assert engine.asked == []


def test_lines_without_a_template_are_plain_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine("fine", template=False)
    converse(monkeypatch, engine, ["one", "two"], False)
    assert [prompt for prompt, _ in engine.asked] == ["one", "two"]


def test_a_failed_turn_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine("fine")
    fails = iter([True, False])

    def before(index: int) -> None:
        if next(fails):
            raise SpikeError("SPK606", "prompt", "too long.", "Shorten it.")

    engine.before = before
    converse(monkeypatch, engine, ["long", "short"], True)
    assert [m["content"] for m in engine.asked[1][0]] == ["be brief", "short"]
    err = capsys.readouterr().err
    assert "error SPK606 in prompt" in err
    assert "/reset" in err
