"""GGUF files: what is written is read back, the `gguf` package agrees, and damage is one error."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spikeinfer.compiler.gguf.reader import GgufFile, Value
from spikeinfer.compiler.gguf.tensor_types import OF_FORMAT, READABLE, REFUSED
from spikeinfer.compiler.gguf.writer import TensorOut, gguf_chunks, write_gguf
from spikeinfer.errors import SpikeError

METADATA: dict[str, Value] = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "negative": -3,
    "wide": 1 << 40,
    "llama.rope.freq_base": 10000.0,
    "yes": True,
    "no": False,
    "empty text": "",
    "words": ["a", "", "naïve 日本"],
    "no words": [],
    "scores": np.array([0.5, -1.25], "<f4"),
    "types": np.array([1, 3, -1], "<i4"),
    "flags": np.array([True, False]),
}


def tensors() -> list[TensorOut]:
    rng = np.random.default_rng(0)

    def out(name: str, format: str, shape: tuple[int, ...]) -> TensorOut:
        type = OF_FORMAT[format]
        size = int(np.prod(shape)) // type.elements * type.bytes
        data = rng.integers(0, 256, size, np.uint8).tobytes()
        return TensorOut(name, type, shape, lambda: [data[:7], memoryview(data)[7:]])

    return [
        out("a.weight", "q4_k", (3, 256)),
        out("b.weight", "q8_0", (2, 5, 64)),
        out("c.bias", "f32", (7,)),
        out("d.weight", "bf16", (1, 3)),
    ]


def image() -> bytes:
    return b"".join(gguf_chunks(METADATA, tensors()))


def opened(path: Path, data: bytes) -> GgufFile:
    path.write_bytes(data)
    return GgufFile(path)


def same(left: Value, right: Value) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return type(left) is type(right) and left == right


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, tensors())
    assert path.read_bytes() == image()
    assert [p.name for p in tmp_path.iterdir()] == ["x.gguf"]
    file = GgufFile(path)
    assert list(file.metadata) == list(METADATA)
    assert all(same(file.metadata[key], value) for key, value in METADATA.items())
    for tensor in tensors():
        assert file.tensors[tensor.name].shape == tensor.shape
        assert file.raw(tensor.name).tobytes() == b"".join(map(bytes, tensor.data()))
    assert file.rows("b.weight").shape == (2, 5, 2 * 34)


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    write_gguf(tmp_path / "x.gguf", METADATA, tensors())
    ours, theirs = GgufFile(tmp_path / "x.gguf"), gguf.GGUFReader(str(tmp_path / "x.gguf"))
    for key, value in METADATA.items():
        if key != "no words":  # the package reads an empty array as an empty list of no type
            expected = theirs.fields[key].contents()
            assert expected == (value.tolist() if isinstance(value, np.ndarray) else value), key
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert entry.begin == tensor.data_offset
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert entry.type.name == tensor.tensor_type.name
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_the_table_of_types_is_the_gguf_packages() -> None:
    for type in gguf.GGMLQuantizationType:
        if type.value in READABLE:
            ours = READABLE[type.value]
            assert (ours.elements, ours.bytes) == gguf.GGML_QUANT_SIZES[type]
            assert ours.name == type.name
        else:
            assert REFUSED[type.value] == type.name


def test_a_tensor_that_the_disk_refuses_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpikeError, match="SPK594"):
        write_gguf(tmp_path / "file" / "x.gguf", METADATA, tensors())
    broken = TensorOut("a", OF_FORMAT["f32"], (4,), lambda: [bytes(3)])
    with pytest.raises(ValueError, match="a has 3 bytes, not 16"):
        write_gguf(tmp_path / "x.gguf", {}, [broken])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def header(*keys: bytes, tensors: tuple[bytes, ...] = (), data: int = 64) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys)
    head += b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def entry(name: bytes, sizes: tuple[int, ...], type: int, offset: int) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return string(name) + shape + struct.pack("<IQ", type, offset)


U32 = struct.pack("<II", 4, 1)
DAMAGED = {
    "not GGUF": (b"GGML" + image()[4:], "SPK130"),
    "empty": (b"", "SPK130"),
    "git-LFS": (b"version https://git-lfs.github.com/spec/v1\noid x\n", "SPK130"),
    "version 1": (b"GGUF\x01" + image()[5:], "SPK130"),
    "big-endian": (b"GGUF\0\0\0\x03" + image()[8:], "SPK130"),
    # The gguf package hangs on these 49 bytes.
    "2**63 strings": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 63),
        "SPK131",
    ),
    "2**63 tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0), "SPK131"),
    "2**63 keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "SPK131"),
    "2**63 letters": (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 63) + bytes(8), "SPK131"),
    "key twice": (header(string(b"k") + U32, string(b"k") + U32), "SPK132"),
    "key not UTF-8": (header(string(b"\xff") + U32), "SPK132"),
    "unknown type": (header(string(b"k") + struct.pack("<I", 13)), "SPK132"),
    "array of arrays": (header(string(b"k") + struct.pack("<IIQ", 9, 9, 0)), "SPK132"),
    "truth value 2": (header(string(b"k") + struct.pack("<IB", 7, 2)), "SPK132"),
    "alignment 0": (header(string(b"general.alignment") + struct.pack("<II", 4, 0)), "SPK132"),
    "alignment 3": (header(string(b"general.alignment") + struct.pack("<II", 4, 3)), "SPK132"),
    "tensor twice": (header(tensors=(entry(b"a", (1,), 0, 0), entry(b"a", (1,), 0, 32))), "SPK132"),
    "overlap": (header(tensors=(entry(b"a", (16,), 0, 0), entry(b"b", (1,), 0, 32))), "SPK132"),
    "not aligned": (header(tensors=(entry(b"a", (1,), 0, 4),)), "SPK132"),
    "outside": (header(tensors=(entry(b"a", (1,), 0, 64),)), "SPK131"),
    "far outside": (header(tensors=(entry(b"a", (1,), 0, (1 << 64) - 32),)), "SPK131"),
    "2**252 values": (header(tensors=(entry(b"a", ((1 << 63),) * 4, 0, 0),)), "SPK131"),
    "five dimensions": (header(tensors=(entry(b"a", (1,) * 5, 0, 0),)), "SPK132"),
    "no values": (header(tensors=(entry(b"a", (0, 4), 0, 0),)), "SPK132"),
    "rows not in blocks": (header(tensors=(entry(b"a", (33,), 8, 0),)), "SPK132"),
    "IQ type": (header(tensors=(entry(b"blk.0.x", (256,), 16, 0),)), "SPK133"),
    "type of the future": (header(tensors=(entry(b"blk.0.x", (256,), 99, 0),)), "SPK133"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_one_error_at_once(tmp_path: Path, case: str) -> None:
    data, code = DAMAGED[case]
    begun = time.monotonic()
    with pytest.raises(SpikeError) as caught:
        opened(tmp_path / "x.gguf", data)
    assert caught.value.code == code
    assert "x.gguf" in caught.value.what
    assert time.monotonic() - begun < 1, "a count in the file made it loop"
    if code == "SPK133":
        assert "blk.0.x" in caught.value.what


def test_whatever_is_cut_off_is_noticed(tmp_path: Path) -> None:
    whole = image()
    end = len(whole) - (-6 % 32)  # padding after the last tensor (6 bytes) may be missing
    assert opened(tmp_path / "x.gguf", whole[:end]).tensors
    for length in {*range(0, end, 13), end - 1}:
        with pytest.raises(SpikeError) as caught:
            opened(tmp_path / "x.gguf", whole[:length])
        assert caught.value.code in ("SPK130", "SPK131")


Damage = Callable[[bytes], bytes]


def flips(data: bytes, places: list[tuple[int, int]]) -> bytes:
    damaged = bytearray(data)
    for place, value in places:
        damaged[place % len(data)] ^= value
    return bytes(damaged)


def spliced(data: bytes, place: int, number: int) -> bytes:
    """A length or count replaced by any u64."""
    place %= len(data) - 8
    return data[:place] + struct.pack("<Q", number) + data[place + 8 :]


DAMAGE = st.one_of(
    st.builds(
        lambda places: lambda data: flips(data, places),
        st.lists(st.tuples(st.integers(0, 1 << 12), st.integers(1, 255)), min_size=1, max_size=4),
    ),
    st.builds(
        lambda place, number: lambda data: spliced(data, place, number),
        st.integers(0, 1 << 12),
        st.one_of(st.integers(0, (1 << 64) - 1), st.integers(0, 300)),
    ),
    st.builds(lambda length: lambda data: data[:length], st.integers(0, 1 << 12)),
    st.builds(lambda tail: lambda data: data[:24] + tail, st.binary(max_size=300)),
)


@settings(deadline=1000, max_examples=300, suppress_health_check=list(HealthCheck))
@given(damage=DAMAGE)
def test_any_damage_gives_an_error_or_a_valid_file(tmp_path: Path, damage: Damage) -> None:
    data = damage(image())
    file, code = None, ""
    try:
        file = opened(tmp_path / "x.gguf", data)
    except SpikeError as error:
        code = error.code
    if file is None:
        assert code in ("SPK130", "SPK131", "SPK132", "SPK133")
        return
    assert sum(len(file.raw(name)) for name in file.tensors) <= len(data)
    for name, tensor in file.tensors.items():
        assert file.rows(name).shape[:-1] == tensor.shape[:-1]
