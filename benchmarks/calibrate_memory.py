"""Peak memory of `spike calibrate` on an 8B's shape: it grows with the tokens, not with the layers.

    .venv/bin/python benchmarks/calibrate_memory.py

Some layers stand for all: weights are random, the vocabulary is the whole one. Needs 4 GB of disk
under .cache/large. Text is read with SmolLM2's tokenizer (any ids will do).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import large_checkpoint

CACHE = Path(__file__).resolve().parent.parent / ".cache"
LARGE = CACHE / "calibrate_memory"
CASES = ((1, 1024), (2, 1024), (2, 3072))
"""Layers and tokens."""
WORKERS = 2


def peak(checkpoint: Path, tokens: int) -> tuple[float, float]:
    """Peak resident MB and seconds of one run."""
    command = [str(Path(sys.executable).with_name("spike")), "calibrate", str(checkpoint)]
    command += ["--output", str(LARGE / "out.gguf"), "--tokens", str(tokens), "--json"]
    text = LARGE / "text.txt"
    process = subprocess.Popen(
        [*command, "--text", str(text), "--workers", str(WORKERS)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    events = [json.loads(line) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"spike calibrate ended with {process.returncode}")
    result = events[-1]
    assert result["windows"] * result["window_tokens"] == tokens
    return usage.ru_maxrss / 1e3 * 1.024, float(result["seconds"])


def main() -> None:
    """Print the table."""
    LARGE.mkdir(parents=True, exist_ok=True)
    (LARGE / "text.txt").write_text("".join(f"{i * 7919 % 100003} " for i in range(20000)))
    print(f"Llama-3-8B's shape, {WORKERS} workers, windows of 512 tokens")
    for layers, tokens in CASES:
        checkpoint = LARGE / f"llama-8b-{layers}"
        large_checkpoint.write(checkpoint, layers)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(CACHE / "models" / "SmolLM2-135M-Instruct" / name, checkpoint)
        megabytes, seconds = peak(checkpoint, tokens)
        print(f"{layers} layers {tokens:6} tokens {megabytes:8.0f} MB {seconds:8.0f} s", flush=True)
    shutil.rmtree(LARGE)


if __name__ == "__main__":
    main()
