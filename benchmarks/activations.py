"""What our arithmetic costs: int8 activations, fp32 in another order, the format of the cache.

    .venv/bin/python benchmarks/activations.py --engine ENGINE --checkpoint CKPT [--windows 6]

The engine is exported to GGUF, the file is read back, and transformers runs its dequantised weights
in float32: the same quantised weights, exact activations. KL(that || engine) on held-out text is
therefore of the arithmetic alone. Below stands the same for the checkpoint's own weights, which is
what quantising the weights costs besides.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import accuracy
from spikeinfer import SpikeEngine
from spikeinfer.compiler.assembly.source import open_source, rebuilt
from spikeinfer.compiler.engine.directory import EngineDirectory
from spikeinfer.compiler.gguf.export import export_gguf


def main() -> None:
    """Prints two lines."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, required=True, help="for its tokenizer, too")
    parser.add_argument("--windows", type=int, default=6)
    options = parser.parse_args()
    text = accuracy.HELD_OUT.read_text(encoding="utf-8")
    with SpikeEngine(options.engine) as engine, tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.gguf"
        export_gguf(EngineDirectory.open(options.engine), file)
        models = {"engine": lambda tokens, first: engine.score(tokens)[first:]}
        same = rebuilt(open_source(file).checkpoint)
        for what, source in (("the same quantised weights", same), ("the checkpoint", None)):
            _, found = accuracy.measure(options.checkpoint, models, text, options.windows, source)
            result = found["engine"]
            print(
                f"to {what}: mean KL {result.mean_kl:.2e}, p99 {result.p99_kl:.2e}, top-1 "
                f"{result.top1:.2%} of {result.positions} positions",
                flush=True,
            )


if __name__ == "__main__":
    main()
