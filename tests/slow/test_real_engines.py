"""What takes minutes on the real checkpoints: long greedy runs, killed builds, shared weights."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from spikeinfer import SpikeEngine
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.driver import BuildRequest, build
from transformers import AutoModelForCausalLM

MODELS = Path(__file__).parents[2] / ".cache" / "models"
SMOLLM2 = MODELS / "SmolLM2-135M-Instruct"
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at",
    "In 1969,",
    "The three laws of motion are",
    "Dear Sir or Madam,",
    "A compiler is a program that",
    "To make bread you need",
    "The cat sat on",
    "import numpy as np\n",
    "Photosynthesis is",
    "She opened the door and",
    "1, 1, 2, 3, 5, 8,",
    "The largest planet",
    "Il était une fois",
    "SELECT name FROM",
    "Shakespeare wrote",
    "The difference between TCP and UDP",
    "My favourite season is",
)


def _streaming(source: Path, output: Path, **options: object) -> Path:
    build(BuildRequest(source, output, enable_streaming=True, golden="off", **options))  # type: ignore[arg-type]
    return output


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "gemma-3-270m"])
def test_greedy_tokens_are_the_sources(name: str, tmp_path: Path) -> None:
    """20 prompts x 128 tokens: by induction, each token is the source's own next choice."""
    engine = SpikeEngine(_streaming(MODELS / name, tmp_path / "engine", dtype="float32"))
    source = AutoModelForCausalLM.from_pretrained(
        MODELS / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    wrong = []
    for prompt in PROMPTS:
        ids = engine.encode(prompt)
        made = list(engine.complete(ids, max_tokens=128).token_ids)
        with torch.no_grad():
            logits = source(torch.tensor([ids + made])).logits[0, len(ids) - 1 : -1]
        wrong += [prompt] if logits.argmax(-1).tolist() != made else []
    assert wrong == []


def test_killed_builds_leave_nothing_or_a_whole_engine(tmp_path: Path) -> None:
    """kill -9 at 20 moments over a whole build; the next build always succeeds."""
    output = tmp_path / "engine"
    command = [
        *(sys.executable, "-P", "-c", "from spikeinfer.cli import main_build; main_build()"),
        *("--model", str(SMOLLM2), "--output-dir", str(output), "--quantization", "q4_k_m"),
        *("--enable-streaming", "--golden", "off"),
    ]
    started = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - started
    moments = random.Random(0)
    for _ in range(20):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(moments.uniform(0, whole))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if output.exists():
            EngineDirectory.open(output, verify=True)
    subprocess.run(command, check=True, capture_output=True)
    EngineDirectory.open(output, verify=True)
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["engine"]


SERVE = """
import sys
from spikeinfer import SpikeEngine
engine = SpikeEngine(sys.argv[1])
engine.complete(list(range(10, 30)), max_tokens=8)
print("ready", flush=True)
sys.stdin.read()
"""


def _private_weight_bytes(pid: int) -> int:
    """Private bytes (clean and dirty) of the mapping of rank0.weights."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if not line.split(":")[0].isidentifier() and "-" in line.split(" ")[0]:
            inside = line.endswith("rank0.weights")
        elif inside and line.startswith("Private_"):
            total += 1024 * int(line.split()[1])
    return total


def test_two_processes_share_the_weights(tmp_path: Path) -> None:
    """All private memory of the second process's weights stays under 15% of their size."""
    engine = _streaming(SMOLLM2, tmp_path / "engine", quantization="q4_k_m")
    size = (engine / "rank0.weights").stat().st_size
    servers = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", SERVE, str(engine)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ},
        )
        for _ in range(2)
    ]
    try:
        for server in servers:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
        maps = Path(f"/proc/{servers[1].pid}/smaps").read_text()
        assert "rank0.weights" in maps
        private = _private_weight_bytes(servers[1].pid)
        print(f"weights {size}, private {private}")
        assert private <= 0.15 * size
    finally:
        for server in servers:
            server.kill()
            server.wait()
