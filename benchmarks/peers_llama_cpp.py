"""llama.cpp as a peer: its own venv, a native build from source, converted and quantised models.

    python benchmarks/peers_llama_cpp.py [CHECKPOINT ...] [--format Q4_K_M]

Everything lies under `.cache/peers/llama_cpp`. The build takes some minutes on two cores, once. The
converter of the same source package runs in our environment (it needs torch and transformers) with
its own `gguf`; quantising and running happen in the peer's environment only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import venv
from dataclasses import dataclass
from pathlib import Path

from worker import Worker

ROOT = Path(__file__).resolve().parent.parent / ".cache" / "peers" / "llama_cpp"
VERSION = "0.3.36"
PACKAGE = f"llama_cpp_python-{VERSION}"
BUILD_OPTIONS = "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF"
HERE = Path(__file__).resolve().parent
KINDS = ("Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0")


@dataclass(frozen=True)
class LlamaCpp:
    """An installed llama.cpp.

    Attributes:
        python: interpreter of its venv.
        source: directory of llama.cpp in the unpacked source package.
        root: where everything of it lies.
    """

    python: Path
    source: Path
    root: Path

    def version(self) -> str:
        """Version, for tables."""
        return f"llama.cpp ({PACKAGE}, native build)"


def install(root: Path = ROOT) -> LlamaCpp:
    """Make the venv and build the package unless both are there."""
    peer = LlamaCpp(root / "venv/bin/python", root / PACKAGE / "vendor/llama.cpp", root)
    archive = root / "download" / f"{PACKAGE}.tar.gz"
    if not archive.is_file():
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
        target = [":all:", "--no-build-isolation", f"llama-cpp-python=={VERSION}"]
        subprocess.run([*download, *target, "-d", str(archive.parent)], check=True)
    if not peer.source.is_dir():
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
    if not (root / "built").is_file():
        print("building llama.cpp (some minutes, once)", flush=True)
        venv.create(root / "venv", with_pip=True, clear=True)
        environment = {**os.environ, "CMAKE_ARGS": BUILD_OPTIONS}
        environment.setdefault("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count()))
        pip = [str(peer.python), "-m", "pip", "install", "-q", str(archive)]
        subprocess.run(["nice", *pip], check=True, env=environment)
        (root / "built").write_text(BUILD_OPTIONS + "\n")
    return peer


def convert(peer: LlamaCpp, checkpoint: Path, dtype: str = "f32") -> Path:
    """The checkpoint as a GGUF of `dtype` (f32, bf16), by llama.cpp's converter; cached."""
    out = peer.root / "models" / f"{checkpoint.resolve().name}-{dtype}.gguf"
    if not out.is_file():
        out.parent.mkdir(parents=True, exist_ok=True)
        work = out.with_suffix(".partial")
        script = [sys.executable, str(HERE / "convert_for_llama_cpp.py"), str(peer.source)]
        subprocess.run([*script, str(checkpoint), str(work), dtype], check=True)
        work.rename(out)
    return out


def quantise(peer: LlamaCpp, checkpoint: Path, kind: str, imatrix: Path | None = None) -> Path:
    """The checkpoint as a quantised GGUF of llama.cpp's own mix; cached.

    `imatrix`: an .npz of mean squares by tensor name, the importance matrix.
    """
    stored = json.loads((checkpoint / "config.json").read_text()).get("dtype")
    dtype = "bf16" if stored == "bfloat16" else "f32"
    name = f"{checkpoint.resolve().name}-{kind}{'-imatrix' if imatrix else ''}.gguf"
    out = peer.root / "models" / name
    if not out.is_file():
        source = convert(peer, checkpoint, dtype)
        work = out.with_suffix(".partial")
        command = {"do": "quantise", "source": str(source), "out": str(work), "kind": kind}
        if imatrix is not None:
            command["imatrix"] = str(imatrix)
        with worker(peer) as process:
            process.call(command)
        work.rename(out)
    return out


def worker(peer: LlamaCpp) -> Worker:
    """A process of the peer that takes commands; see `workers/llama_cpp_worker.py`."""
    return Worker(worker_command(peer))


def worker_command(peer: LlamaCpp) -> list[str]:
    """What starts it."""
    return [str(peer.python), str(HERE / "workers" / "llama_cpp_worker.py")]


def main() -> None:
    """Install; convert and quantise each checkpoint given."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", nargs="*", type=Path)
    parser.add_argument("--format", default="Q4_K_M", choices=KINDS)
    arguments = parser.parse_args()
    peer = install()
    print(peer.version())
    for checkpoint in arguments.checkpoint:
        path = quantise(peer, checkpoint, arguments.format)
        print(path, f"{path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
