"""Publishing an engine: a whole one or none, whatever happens in between."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from spikeinfer import SpikeError
from spikeinfer.compiler.engine import (
    BuildConfig,
    EngineConfig,
    EngineDirectory,
    EngineWriter,
    Evidence,
    PretrainedConfig,
    Provenance,
    QuantizationConfig,
    SpikeConfig,
    durable,
    writer,
)

# Builds one engine at argv[1] whose weights consist of the byte argv[2].
BUILDER = """
import sys
from spikeinfer.compiler.engine import *
def build(output, fill, chunks=1):
    with EngineWriter(output, version="0.1.0") as writer:
        with writer.weights() as weights:
            for name in ("a", "b", "c"):
                data = [bytes([fill]) * 4096] * chunks
                weights.append(name, format="f32", shape=(1, 1024 * chunks), role="other",
                               parameters=(), chunks=data)
        writer.write("rank0.engine", b"graph")
        model = PretrainedConfig("A", "a", "f32", 8, 8, 1, 1, 1, 8, 8, QuantizationConfig("f", "f"))
        spike = SpikeConfig("streaming", "onnxruntime", 8, (), (), weights.specs)
        writer.stage(EngineConfig(model, BuildConfig(8, 1, 8, "paged", 4, True), spike),
                     Provenance("source"))
        writer.publish(Evidence("off"))
"""

# Forks one build per step and kills it at exactly that step, until one build gets to its end.
# Steps are audit events: every open, mkdir, rename, remove.
KILL_AT_EVERY_STEP = """
import os, signal
output, before, swap = sys.argv[1], sys.argv[2] == "replace", sys.argv[3] == "swap"
from spikeinfer.compiler.engine import writer
if not swap:
    writer.exchange = lambda first, second: False
step = 0
while True:
    child = os.fork()
    if child == 0:
        left = [step]
        def hook(event, arguments):
            if event == "open" or event.startswith(("os.", "shutil.")) and event != "os.kill":
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        build(output, 2)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if os.path.lexists(output):
        engine = EngineDirectory.open(output, verify=True)
        fill = engine.weights_path.read_bytes()[0]
    else:
        fill = 0
    print(step, os.waitstatus_to_exitcode(status), fill)
    build(output, 1)
    assert EngineDirectory.open(output, verify=True).weights_path.read_bytes()[0] == 1
    left = [n for n in os.listdir(os.path.dirname(output)) if n != "engine"]
    assert not left, left
    if not before:
        __import__("shutil").rmtree(output)
    if status == 0:
        break
    step += 1
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True
    )


def tiny_build(output: Path, fill: int = 1) -> Path:
    """The same engine as BUILDER writes, in this process."""
    space: dict[str, Any] = {}
    exec(BUILDER, space)
    space["build"](str(output), fill)
    return output


def first_byte(path: Path) -> int:
    return EngineDirectory.open(path, verify=True).weights_path.read_bytes()[0]


@pytest.mark.parametrize(
    ("kind", "way"), [("new", "swap"), ("replace", "swap"), ("replace", "aside")]
)
def test_killed_at_every_step_leaves_a_whole_engine_or_none(
    tmp_path: Path, kind: str, way: str
) -> None:
    output = tmp_path / "engine"
    if kind == "replace":
        tiny_build(output, 1)
    done = run_python(BUILDER + KILL_AT_EVERY_STEP, str(output), kind, way)
    assert done.returncode == 0, done.stderr
    steps = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(steps) > 20
    assert steps[-1][1:] == (0, 2)
    assert all(code == -signal.SIGKILL for _, code, _ in steps[:-1])
    fills = [fill for _, _, fill in steps]
    # Never a third thing: before the rename what was there, after it the new engine. Only where
    # directories can't be swapped may the old one be absent for a moment.
    old = 1 if kind == "replace" else 0
    assert set(fills) <= {old, 2} | ({0} if way == "aside" else set())
    assert fills == sorted(fills, key=lambda fill: fill == 2)


def test_killed_at_random_moments_while_writing_large_weights(tmp_path: Path) -> None:
    output, generator = tmp_path / "engine", random.Random(5)
    code = BUILDER + "build(sys.argv[1], 1, chunks=4000)"
    for _ in range(8):
        process = subprocess.Popen([sys.executable, "-c", code, str(output)])
        lock = tmp_path / ".engine.spike-lock"
        while process.poll() is None and not lock.exists():
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.3))
        process.kill()
        process.wait()
        if output.exists():
            EngineDirectory.open(output, verify=True)
    tiny_build(output, 3)
    assert first_byte(output) == 3
    assert os.listdir(tmp_path) == ["engine"]


def test_the_next_build_of_another_engine_clears_up_too(tmp_path: Path) -> None:
    killed = BUILDER + (
        "import os, signal\n"
        "w = EngineWriter(sys.argv[1], version='1')\n"
        "w.write('rank0.engine', b'x')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    run_python(killed, str(tmp_path / "first"))
    assert len(os.listdir(tmp_path)) == 2
    with EngineWriter(tmp_path / "second", version="1"):
        tiny_build(tmp_path / "third")
        # Live builds are left alone.
        assert len(os.listdir(tmp_path)) == 3
    assert os.listdir(tmp_path) == ["third"]


def test_two_builds_of_the_same_engine(tmp_path: Path) -> None:
    output = tmp_path / "engine"
    with EngineWriter(output, version="1"):
        with pytest.raises(SpikeError) as caught:
            EngineWriter(output, version="1")
        assert caught.value.code == "SPK505"
        assert f"process {os.getpid()}" in caught.value.what
    tiny_build(output)


def test_replacing_an_engine_while_readers_open_it(tmp_path: Path) -> None:
    output = tiny_build(tmp_path / "engine", 1)
    code = BUILDER + "for i in range(40): build(sys.argv[1], 1 + i % 2)"
    process = subprocess.Popen([sys.executable, "-c", code, str(output)])
    opened = 0
    while process.poll() is None:
        EngineDirectory.open(output)
        opened += 1
    assert process.returncode == 0
    assert opened > 0
    assert EngineDirectory.open(output).is_current()


def test_an_opened_engine_knows_when_it_was_replaced(tmp_path: Path) -> None:
    output = tiny_build(tmp_path / "engine", 1)
    engine = EngineDirectory.open(output)
    assert engine.is_current()
    tiny_build(output, 2)
    assert not engine.is_current()


def test_only_engines_and_empty_directories_are_replaced(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(SpikeError) as caught:
            EngineWriter(path, version="1")
        assert caught.value.code == "SPK504"
        return caught.value.what

    precious = tmp_path / "precious"
    precious.mkdir()
    tiny_build(precious)  # was empty
    (precious / "thesis.txt").write_text("years of work")
    assert "thesis.txt" in refusal(precious)
    (precious / "thesis.txt").unlink()
    (precious / "manifest.json").write_text("{}")
    assert "not one of ours" in refusal(precious)
    (precious / "manifest.json").unlink()
    assert "no manifest.json" in refusal(precious)
    (tmp_path / "file").write_text("")
    assert "not a directory" in refusal(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == ["file", "precious"]


def test_a_damaged_engine_of_ours_is_replaced(tmp_path: Path) -> None:
    output = tiny_build(tmp_path / "engine")
    (output / "rank0.weights").write_bytes(b"")
    tiny_build(output, 4)
    assert first_byte(output) == 4


def test_a_link_to_the_output_keeps_pointing_there(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "engine")
    tiny_build(tmp_path / "link", 6)
    assert (tmp_path / "link").is_symlink()
    assert first_byte(tmp_path / "disk" / "engine") == 6


def test_a_failure_leaves_nothing_or_what_was_asked_to_be_kept(tmp_path: Path) -> None:
    def fail(keep: bool) -> None:
        with EngineWriter(tmp_path / "engine", version="1", keep_failed=keep) as engine:
            engine.write("rank0.engine", b"graph")
            raise SpikeError("SPK999", "golden", "KL too large.", "Use q6_k.")

    with pytest.raises(SpikeError, match="SPK999"):
        fail(keep=False)
    assert os.listdir(tmp_path) == []
    for _ in range(2):  # an older one gives way
        with pytest.raises(SpikeError, match="SPK999"):
            fail(keep=True)
        assert os.listdir(tmp_path) == ["engine.failed"]
    kept = tmp_path / "engine.failed"
    assert (kept / "rank0.engine").read_bytes() == b"graph"
    assert "KL too large" in (kept / "FAILED.txt").read_text()
    (kept / "FAILED.txt").unlink()
    with pytest.raises(SpikeError, match="SPK999"):
        fail(keep=True)
    assert sorted(os.listdir(tmp_path)) == ["engine.failed", "engine.failed.2"]


@pytest.mark.parametrize("strangers", [[], ["of_another"]])
def test_a_failure_leaves_no_empty_directories_above_the_output(
    tmp_path: Path, strangers: list[str]
) -> None:
    def fail() -> None:
        with EngineWriter(tmp_path / "a" / "b" / "engine", version="1"):
            for name in strangers:
                (tmp_path / "a" / "b" / name).touch()
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        fail()
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == strangers
    assert os.listdir(tmp_path) == (["a"] if strangers else [])


def test_a_kept_failed_engine_does_not_open_by_accident(tmp_path: Path) -> None:
    output = tiny_build(tmp_path / "engine")
    (output / "FAILED.txt").write_text("KL too large")
    with pytest.raises(SpikeError) as caught:
        EngineDirectory.open(output)
    assert caught.value.code == "SPK517"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, call: str
) -> None:
    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(durable.os, call, full)
    with pytest.raises(SpikeError) as caught:
        tiny_build(tmp_path / "engine")
    monkeypatch.undo()
    assert caught.value.code == "SPK503"
    assert "no space left" in caught.value.what
    assert os.listdir(tmp_path) == []


def test_a_file_size_limit_is_the_same_error_for_real(tmp_path: Path) -> None:
    code = BUILDER + (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "build(sys.argv[1], 1, chunks=200)"
    )
    done = run_python(code, str(tmp_path / "engine"))
    assert "SPK503 engine: no space left while writing" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_backend_that_runs_out_of_space_by_itself(tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match="SPK503"), EngineWriter(tmp_path / "e", version="1"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_space_is_checked_before_the_work(tmp_path: Path) -> None:
    with EngineWriter(tmp_path / "engine", version="1") as engine:
        engine.require_space(1)
        with pytest.raises(SpikeError, match="SPK516"):
            engine.require_space(1 << 60)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpikeError, match=r"SPK504|SPK514"):
        EngineWriter(tmp_path / "file" / "engine", version="1")


def test_publishing_needs_config_and_evidence(tmp_path: Path) -> None:
    model = PretrainedConfig("A", "a", "f", 8, 8, 1, 1, 1, 8, 8, QuantizationConfig("f", "f"))
    build = BuildConfig(8, 1, 8, "paged", 4, True)
    config = EngineConfig(model, build, SpikeConfig("streaming", "ort", 8, (), (), ()))
    with EngineWriter(tmp_path / "engine", version="1") as engine:
        with pytest.raises(ValueError, match="stage"):
            engine.publish(Evidence("off"))
        engine.stage(config, Provenance("x"))
        with pytest.raises(ValueError, match="evidence"):
            engine.publish()
    assert os.listdir(tmp_path) == []


@pytest.fixture(autouse=True)
def _everything_is_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test leaves a descriptor open, on whatever path it left a writer."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before


def test_swapping_falls_back_where_the_system_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tiny_build(tmp_path / "engine", 1)
    monkeypatch.setattr(writer, "exchange", lambda first, second: False)
    tiny_build(output, 2)
    assert first_byte(output) == 2
    assert os.listdir(tmp_path) == ["engine"]
