"""A caller's mistake is one clear error for that caller: no hang, no rubbish, no harm to others."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikeinfer import SpikeEngine, SpikeError
from spikeinfer.driver import BuildRequest, build

TINY = Path(__file__).parents[2] / ".cache" / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("bad") / "engine"
    build(BuildRequest(TINY, output, dtype="float32", enable_streaming=True, golden="off"))
    return output


@pytest.fixture
def engine(directory: Path) -> Iterator[SpikeEngine]:
    with SpikeEngine(directory) as engine:
        yield engine


@pytest.mark.parametrize("chunk", [0, -1, -7, 1.5, True])
def test_score_refuses_chunks_that_are_no_count(engine: SpikeEngine, chunk: Any) -> None:
    with pytest.raises(SpikeError, match="SPK608 chunk_tokens"):
        engine.score([5, 6, 7], chunk_tokens=chunk)


@pytest.mark.parametrize(
    "option",
    [
        {"top_k": 1.5},
        {"max_tokens": 2.5},
        {"temperature": "x"},
        {"min_p": "x"},
        {"top_p": None},
        {"repetition_penalty": "x"},
        {"seed": 1.5},
        {"stop": [b"x"]},
        {"stop": [5]},
        {"stop": 5},
        {"stop_token_ids": 7},
        {"stop_token_ids": None},
    ],
    ids=str,
)
def test_options_of_a_wrong_type_harm_nobody(engine: SpikeEngine, option: dict[str, Any]) -> None:
    expected = engine.complete([7, 8], max_tokens=12, ignore_eos=True).token_ids
    stream = engine.stream([7, 8], max_tokens=12, ignore_eos=True)
    next(stream, None)
    with pytest.raises(SpikeError, match="SPK608"):
        engine.complete([5, 6], **({"temperature": 1.0} | option))
    for _ in stream:
        pass
    assert stream.completion.token_ids == expected


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {"a": 1}, (i for i in [1]), [2**70], [[1], [2, 3]], [1.5], "\ud800"],
    ids=["none", "int", "dict", "generator", "large id", "lists", "float", "surrogate"],
)
def test_prompts_that_are_none(engine: SpikeEngine, prompt: Any) -> None:
    with pytest.raises(SpikeError, match=r"SPK6(07|11)"):
        engine.complete(prompt, max_tokens=1)


def test_unexpected_errors_in_a_step_end_its_requests(
    engine: SpikeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    with monkeypatch.context() as patch:
        patch.setattr("spikeinfer.runtime.turn.choose_best", broken)
        with pytest.raises(SpikeError, match=r"SPK616 .*planted"):
            list(engine.stream([7, 8], max_tokens=4))
    assert len(engine.complete([7, 8], max_tokens=4, ignore_eos=True).token_ids) == 4


@pytest.mark.parametrize("name", ["max_num_tokens", "max_seq_len", "threads", "kv_cache_memory"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_engine_limits_are_counts(directory: Path, name: str, value: Any) -> None:
    with pytest.raises(SpikeError, match=f"SPK608 {name}"):
        SpikeEngine(directory, **{name: value})


def test_decode_and_quant_config_refuse_other_things(engine: SpikeEngine, directory: Path) -> None:
    with pytest.raises(SpikeError, match=r"SPK6(07|11)"):
        engine.decode([-1])
    with pytest.raises(SpikeError, match="SPK603"):
        SpikeEngine(directory, quant_config="q4")  # type: ignore[arg-type]
    assert np.isfinite(engine.score([5, 6])).all()


@pytest.mark.parametrize(
    ("template", "words"), [(b"{% if %}", "TemplateSyntaxError"), (b"\xff\xfe", "UnicodeDecode")]
)
def test_a_broken_chat_template_is_refused_before_work(
    template: bytes, words: str, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    shutil.copytree(TINY, source)
    (source / "chat_template.jinja").write_bytes(template)
    with pytest.raises(SpikeError, match=f"SPK129 checkpoint: the chat template .*{words}"):
        build(BuildRequest(source, tmp_path / "engine", golden="off"))
    assert not (tmp_path / "engine").exists()
