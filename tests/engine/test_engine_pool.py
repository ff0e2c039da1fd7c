"""Several engines in one process: same tokens after any switches, never more memory than said."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from spikeinfer import EnginePool, SpikeEngine, SpikeError
from spikeinfer.driver import BuildRequest, build

MODELS = Path(__file__).parents[2] / ".cache" / "models"
ENGINES = {
    "llama": ("tiny-llama", "q8_0", "f16"),
    "gemma": ("tiny-gemma3", "none", "int4"),
    "qwen": ("tiny-qwen3", "q8_0", "int8"),
}
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pool")
    for name, (model, quantization, cache) in ENGINES.items():
        build(
            BuildRequest(
                MODELS / model,
                root / name,
                quantization=quantization,
                enable_streaming=True,
                kv_cache_dtype=cache,
                max_num_tokens=64,
                max_batch_size=4,
                max_seq_len=128,
                golden="off",
            )
        )
    return {name: root / name for name in ENGINES}


@pytest.fixture(scope="module")
def expected(paths: dict[str, Path]) -> dict[str, list[int]]:
    """What each engine says when it is alone in the process."""
    found = {}
    for name, path in paths.items():
        with SpikeEngine(path, threads=1) as engine:
            found[name] = engine.complete(PROMPT, max_tokens=12, ignore_eos=True).token_ids
    assert len({tuple(tokens) for tokens in found.values()}) == len(ENGINES)
    return found


@pytest.fixture(scope="module")
def sizes(paths: dict[str, Path]) -> dict[str, int]:
    """Bytes of each while it is mapped."""
    found = {}
    for name in paths:
        with EnginePool(paths, 1 << 40, threads=1) as pool:
            with pool.use(name):
                pass
            found[name] = pool.mapped_bytes
    return found


def ask(pool: EnginePool, name: str, timeout: float = 0.0) -> list[int]:
    with pool.use(name, timeout) as engine:
        return engine.complete(PROMPT, max_tokens=12, ignore_eos=True).token_ids


def weights_mapped(path: Path) -> bool:
    return str(path / "rank0.weights") in Path("/proc/self/maps").read_text()


def code_of(act: Callable[[], object]) -> str:
    with pytest.raises(SpikeError) as caught:
        act()
    return caught.value.code


def test_same_tokens_after_any_number_of_switches(
    paths: dict[str, Path], expected: dict[str, list[int]], sizes: dict[str, int]
) -> None:
    """Room for any two of three: each switch finds its engine mapped or maps it."""
    memory = sum(sizes.values()) - 1
    order = random.Random(0)
    with EnginePool(paths, memory, threads=1) as pool:
        used: list[str] = []
        for name in order.choices(list(paths), k=60):
            assert ask(pool, name) == expected[name]
            used = [*(other for other in used if other != name), name]
            assert pool.mapped == tuple(used[-2:])
            assert pool.mapped_bytes == sum(sizes[other] for other in pool.mapped) <= memory
    assert not any(weights_mapped(path) for path in paths.values())


def test_what_is_evicted_is_unmapped_and_keeps_its_tokenizer(
    paths: dict[str, Path], expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with EnginePool(paths, 1 << 40, threads=1) as pool:
        assert pool.mapped == ()
        with pool.use("llama") as engine:
            assert weights_mapped(paths["llama"])
            text = engine.decode(PROMPT) if engine.has_tokenizer else ""
        pool.evict("llama")
        pool.evict("llama")  # twice is once
        assert not weights_mapped(paths["llama"])
        assert engine.closed
        assert code_of(lambda: engine.complete(PROMPT)) == "SPK617"
        monkeypatch.setattr("spikeinfer.runtime.loading.TextCodec.open", None)  # is not called
        assert ask(pool, "llama") == expected["llama"]
        with pool.use("llama") as again:
            assert (again.decode(PROMPT) if again.has_tokenizer else "") == text


def test_an_engine_in_use_is_not_evicted(paths: dict[str, Path], sizes: dict[str, int]) -> None:
    """Neither inside a block nor while a request runs; the others make room if that is enough."""
    memory = max(sizes.values()) + min(sizes.values())
    small, large = (f(sizes, key=sizes.__getitem__) for f in (min, max))
    other = next(name for name in sizes if name not in (small, large))
    with EnginePool(paths, memory, threads=1) as pool:
        with pool.use(small) as engine:
            stream = engine.stream(PROMPT, max_tokens=100, ignore_eos=True)
            stream._advance(until_piece=True)
            with pool.use(large):
                assert code_of(lambda: ask(pool, other)) == "SPK619"
                assert set(pool.mapped) == {small, large}  # nobody was evicted for nothing
            assert code_of(lambda: pool.evict(small)) == "SPK620"
            assert code_of(pool.close) == "SPK620"
            assert ask(pool, other)
        assert code_of(lambda: pool.evict(small)) == "SPK620"  # its request still runs
        stream.run()
        assert len(stream.completion.token_ids) == 100
        pool.evict(small)
        assert small not in pool.mapped


def test_who_waits_gets_the_room_that_others_leave(
    paths: dict[str, Path], expected: dict[str, list[int]], sizes: dict[str, int]
) -> None:
    """Six threads, room for the largest engine or two others: they take turns."""
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for _ in range(3):
                assert ask(pool, name, timeout=60) == expected[name]
        except BaseException as error:
            failures.append(error)

    with EnginePool(paths, max(sizes.values()), threads=1) as pool:
        threads = [threading.Thread(target=work, args=(n,)) for n in [*paths, *paths]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert 0 < pool.mapped_bytes <= max(sizes.values())


def test_closing_ends_what_runs_outside_of_blocks(paths: dict[str, Path]) -> None:
    pool = EnginePool(paths, 1 << 40, threads=1)
    with pool.use("llama") as engine:
        stream = engine.stream(PROMPT, max_tokens=100, ignore_eos=True)
        stream._advance(until_piece=True)
    pool.close()
    assert stream.completion.finish_reason == "cancelled"
    assert pool.mapped == ()
    assert code_of(lambda: ask(pool, "llama")) == "SPK617"
    pool.close()


def test_an_engine_that_was_closed_or_built_anew_is_mapped_again(
    paths: dict[str, Path], expected: dict[str, list[int]], tmp_path: Path
) -> None:
    place = tmp_path / "engine"
    place.symlink_to(paths["llama"])
    with EnginePool({"one": place}, 1 << 40, threads=1) as pool:
        with pool.use("one") as engine:
            engine.close()
        assert ask(pool, "one") == expected["llama"]
        place.unlink()
        place.symlink_to(paths["qwen"])
        assert ask(pool, "one") == expected["llama"]  # what is mapped stays
        pool.evict("one")
        assert ask(pool, "one") == expected["qwen"]


def test_what_cannot_be_used_is_said(paths: dict[str, Path], sizes: dict[str, int]) -> None:
    assert code_of(lambda: EnginePool({"a": Path("/nowhere")}, 1 << 30)) == "SPK601"
    assert code_of(lambda: EnginePool(paths, 0)) == "SPK608"
    assert code_of(lambda: EnginePool(paths, 1 << 30, threads=0)) == "SPK608"
    assert code_of(lambda: EnginePool(paths, 1 << 30, max_num_tokens=-1)) == "SPK608"
    with EnginePool(paths, min(sizes.values()) - 1, threads=1) as pool:
        assert code_of(lambda: ask(pool, "gemma")) == "SPK619"
        assert code_of(lambda: ask(pool, "llama", float("nan"))) == "SPK608"
        with pytest.raises(SpikeError, match="Did you mean 'llama'"):
            ask(pool, "lama")
        assert pool.mapped_bytes == 0
    with EnginePool(paths, 1 << 40, kv_cache_memory=1) as pool:
        assert code_of(lambda: ask(pool, "llama")) == "SPK615"
        assert pool.mapped_bytes == 0
