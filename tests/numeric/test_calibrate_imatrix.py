"""Files of importances: the gguf package reads ours, old ones are read, damaged ones refused."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spikeinfer import SpikeError
from spikeinfer.compiler.calibrate import Entry, Importance, read_imatrix, write_imatrix
from spikeinfer.compiler.ir import Constant, DType, TensorType

ENTRIES = {
    "blk.1.ffn_down.weight": Entry(np.array([1.0, 2.0, 4.0, 8.0]), np.array([4])),
    "blk.0.ffn_up_exps.weight": Entry(
        np.array([[2.0, 4.0], [0.0, 0.0], [9.0, 3.0]]), np.array([2, 0, 3])
    ),
}
IMPORTANCE = Importance(ENTRIES, ("a.txt", "b.txt"), 3, 512)


def constant(*shape: int, parameter: str = "p") -> Constant:
    return Constant("c", TensorType(DType.F32, shape), parameter=parameter)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "ours.gguf"
    write_imatrix(path, IMPORTANCE)
    return path


def test_the_gguf_package_finds_what_llama_cpp_looks_for(written: Path) -> None:
    """Names, order and shapes as llama-imatrix writes them (ggml drops dimensions of 1)."""
    reader = gguf.GGUFReader(written)
    assert reader.fields["general.type"].contents() == "imatrix"
    assert reader.fields["imatrix.datasets"].contents() == ["a.txt", "b.txt"]
    assert reader.fields["imatrix.chunk_count"].contents() == 3
    assert reader.fields["imatrix.chunk_size"].contents() == 512
    found = {t.name: (t.shape.tolist(), t.data.reshape(-1).tolist()) for t in reader.tensors}
    assert list(found.items()) == [
        ("blk.0.ffn_up_exps.weight.in_sum2", ([2, 3], [2.0, 4.0, 0.0, 0.0, 9.0, 3.0])),
        ("blk.0.ffn_up_exps.weight.counts", ([1, 3], [2.0, 0.0, 3.0])),
        ("blk.1.ffn_down.weight.in_sum2", ([4], [1.0, 2.0, 4.0, 8.0])),
        ("blk.1.ffn_down.weight.counts", ([1], [4.0])),
    ]
    assert {t.tensor_type for t in reader.tensors} == {gguf.GGMLQuantizationType.F32}


def test_a_file_is_read_as_it_was_written(written: Path, tmp_path: Path) -> None:
    found = read_imatrix(written)
    assert (found.datasets, found.chunks, found.chunk_tokens) == (("a.txt", "b.txt"), 3, 512)
    for name, entry in ENTRIES.items():
        assert np.array_equal(found.entries[name].sums, entry.sums)
        assert np.array_equal(found.entries[name].counts, entry.counts)
    write_imatrix(tmp_path / "again.gguf", found)
    assert (tmp_path / "again.gguf").read_bytes() == written.read_bytes()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_file_of_the_gguf_packages_writer_is_read(tmp_path: Path) -> None:
    """As llama-imatrix has plain matrices in files of older versions: [1, K] and [1, 1]."""
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "", use_temp_file=False)
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["x"])
    writer.add_uint32("imatrix.chunk_count", 7)
    writer.add_uint32("imatrix.chunk_size", 16)
    writer.add_tensor("w.in_sum2", np.array([[1.0, 2.0, 3.0]], np.float32))
    writer.add_tensor("w.counts", np.array([[112.0]], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = read_imatrix(path)
    assert (found.datasets, found.chunks, found.chunk_tokens) == (("x",), 7, 16)
    means = found.of(constant(5, 3, parameter="w"), {})
    assert means is not None
    assert means.tolist() == pytest.approx([1 / 112, 2 / 112, 3 / 112])


def old_file(*, calls: int = 3, tail: bytes = b"") -> bytes:
    """As `save_imatrix_legacy` writes it."""
    entries = {"w": [3.0, 6.0], "experts": [3.0, 6.0, 9.0, 12.0]}
    data = struct.pack("<i", len(entries))
    for name, means in entries.items():
        raw = name.encode()
        data += struct.pack("<i", len(raw)) + raw + struct.pack("<ii", calls, len(means))
        data += np.array(means, "<f4").tobytes()
    return data + tail


@pytest.mark.parametrize("tail", [b"", struct.pack("<i", 9), struct.pack("<ii", 9, 1) + b"x"])
def test_an_old_file_is_read(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "old.dat"
    path.write_bytes(old_file(tail=tail))
    found = read_imatrix(path)
    assert found.chunks == (9 if tail else 0)
    assert list(found.datasets) == (["x"] if len(tail) > 4 else [])
    plain = found.of(constant(4, 2, parameter="w"), {})
    stack = found.of(constant(2, 4, 2, parameter="experts"), {})
    assert plain is not None
    assert stack is not None
    assert plain.tolist() == [1.0, 2.0]
    assert stack.tolist() == [[1.0, 2.0], [3.0, 4.0]]


@pytest.mark.parametrize("kind", ["new", "old"])
def test_a_file_that_is_cut_off_anywhere_is_refused(
    tmp_path: Path, written: Path, kind: str
) -> None:
    whole = written.read_bytes() if kind == "new" else old_file()
    path = tmp_path / "cut"
    for length in range(len(whole) - (31 if kind == "new" else 0)):  # the padding may be missing
        path.write_bytes(whole[:length])
        with pytest.raises(SpikeError, match=r"SPK412 importances: .*cut") as caught:
            read_imatrix(path)
        assert "ownload" not in caught.value.remedy


@settings(
    max_examples=300, deadline=500, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(
    tmp_path: Path, written: Path, data: st.DataObject
) -> None:
    """Never another error, never a hang or a huge allocation: lengths are checked first."""
    whole = bytearray(data.draw(st.sampled_from([written.read_bytes(), old_file()])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 8))
        value = data.draw(st.sampled_from([0, 1, 0x7F, 0xFF, 1 << 31, (1 << 63) - 1]))
        raw = value.to_bytes(8, "little")[: data.draw(st.sampled_from([1, 4, 8]))]
        whole[at : at + len(raw)] = raw
    path = tmp_path / "damaged"
    path.write_bytes(whole)
    with suppress(SpikeError):
        assert read_imatrix(path).entries


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (Entry(np.array([1.0, np.nan]), np.array([4])), "has the sum of squares nan"),
        (Entry(np.array([1.0, np.inf]), np.array([4])), "has the sum of squares inf"),
        (Entry(np.array([-1.0, 2.0]), np.array([4])), "has the sum of squares -1.0"),
        (Entry(np.array([1.0, 2.0]), np.array([-4])), "has the count -4.0"),
        (Entry(np.array([1.0, 2.0]), np.array([0.5])), "has the count 0.5"),
        (Entry(np.ones((2, 3)), np.array([1, 1, 1, 1])), "has 6 sums and 4 counts"),
    ],
)  # fmt: skip
def test_values_that_no_text_gives_are_refused(tmp_path: Path, entry: Entry, reason: str) -> None:
    path = tmp_path / "odd.gguf"
    write_imatrix(path, Importance({"w": entry}))
    with pytest.raises(SpikeError, match=rf"SPK412 .*w {reason}"):
        read_imatrix(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(model, "llama", use_temp_file=False)
    writer.add_tensor("token_embd.weight", np.ones((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(SpikeError, match=r"SPK412 .*general.type is 'model'"):
        read_imatrix(model)
    write_imatrix(tmp_path / "empty.gguf", Importance({}))
    with pytest.raises(SpikeError, match=r"SPK412 .*no sums"):
        read_imatrix(tmp_path / "empty.gguf")
    for missing in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(SpikeError, match=r"SPK126"):
            read_imatrix(missing)


def test_an_expert_without_tokens_gets_the_mean_of_the_others() -> None:
    """Over their tokens: (2 + 9) / 5 and (4 + 3) / 5."""
    means = IMPORTANCE.of(constant(3, 7, 2, parameter="blk.0.ffn_up_exps.weight"), {})
    assert means is not None
    assert means.dtype == np.float32
    assert means == pytest.approx(np.array([[1.0, 2.0], [11 / 5, 7 / 5], [3.0, 1.0]]))
    assert IMPORTANCE.unseen == {"blk.0.ffn_up_exps.weight": [1]}


def test_a_channel_that_was_always_zero_keeps_some_weight() -> None:
    entry = Entry(np.array([0.0, 3.0]), np.array([3]))
    means = entry.means((8, 2))
    assert means is not None
    assert 0 < means[0] < 1e-5 < means[1]
    assert Entry(np.zeros(2), np.array([3])).means((8, 2)) is None
    assert Entry(np.zeros((2, 2)), np.array([0, 0])).means((2, 8, 2)) is None


def test_importances_of_another_model_are_refused() -> None:
    names = {"down": ("blk.1.ffn_down.weight",)}
    fits, strange = constant(9, 4, parameter="down"), constant(9, 4, parameter="elsewhere")
    assert IMPORTANCE.require_fit([fits, strange], names) == ["elsewhere"]
    with pytest.raises(SpikeError, match=r"SPK413 .*none of its tensors"):
        IMPORTANCE.require_fit([strange], names)
    with pytest.raises(SpikeError, match=r"SPK413 .*blk\.1\.ffn_down\.weight: it has 4 sums"):
        IMPORTANCE.require_fit([constant(9, 5, parameter="down")], names)
