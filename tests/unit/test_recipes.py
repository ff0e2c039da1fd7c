"""Recipes: the shipped ones are sound, flags win, and every mistake is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from spikeinfer import ExitCode, SpikeError
from spikeinfer.compiler.assembly.request import BuildRequest
from spikeinfer.compiler.golden import thresholds_for
from spikeinfer.console import recipes
from spikeinfer.console.options import request_from

PATHS = {"model": Path("M"), "output_dir": Path("E")}


def write(folder: Path, text: str) -> str:
    path = folder / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(folder: Path, text: str) -> SpikeError:
    with pytest.raises(SpikeError) as caught:
        recipes.load(write(folder, text))
    assert caught.value.exit_code is ExitCode.BAD_INPUT
    assert str(folder / "mine.yaml") in caught.value.what
    return caught.value


def test_the_shipped_recipes() -> None:
    assert recipes.shipped() == [
        "gemma3-270m-q4_k_m",
        "llama3-70b-q4_k_m",
        "llama3-8b-q4_k_m",
        "smollm2-135m-q4_k_m",
    ]


@pytest.mark.parametrize("name", recipes.shipped())
def test_a_shipped_recipe_is_a_valid_request(name: str) -> None:
    request = request_from(PATHS, name)
    assert request.quantization == "q4_k_m"
    assert request.enable_streaming
    thresholds_for(request.quantization, "float32").override(request.thresholds)


def test_every_section(tmp_path: Path) -> None:
    text = """
version: 1
build:
  quantization: q6_k
  enable_streaming: yes
  max_seq_len: null
  model_type: llama
passes:
  without: [fuse-residual]
  options:
    raise-rope: {probes: 4}
golden:
  set: off
  thresholds:
    mean_kl: 1
    top1: 0.5
"""
    options = recipes.load(write(tmp_path, text)).options
    assert options == {
        "quantization": "q6_k",
        "enable_streaming": True,
        "max_seq_len": None,
        "model_type": "llama",
        "without": ("fuse-residual",),
        "pass_options": {"raise-rope": {"probes": 4}},
        "golden": "off",
        "thresholds": {"mean_kl": 1.0, "top1": 0.5},
    }
    request = BuildRequest(**PATHS, **options)
    assert request.max_seq_len is None


def test_flags_override_a_recipe_and_a_recipe_the_defaults(tmp_path: Path) -> None:
    recipe = write(tmp_path, "version: 1\nbuild: {quantization: q6_k, max_batch_size: 3}\n")
    flags = {**PATHS, "max_batch_size": 5, "quantization": None, "enable_streaming": None}
    request = request_from(flags, recipe)
    assert (request.max_batch_size, request.quantization) == (5, "q6_k")
    assert request.max_num_tokens == BuildRequest(**PATHS).max_num_tokens


def test_a_golden_set_is_found_beside_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "set.yaml").touch()
    text = "version: 1\ngolden: {set: set.yaml}\n"
    assert recipes.load(write(tmp_path, text)).options["golden"] == str(tmp_path / "set.yaml")


def test_an_unreadable_golden_set_is_found_before_the_build(tmp_path: Path) -> None:
    recipe = write(tmp_path, "version: 1\ngolden: {set: nowhere.yaml}\n")
    with pytest.raises(SpikeError, match="SPK541"):
        request_from(PATHS, recipe)


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        ("SPK812", "version: 1\nbuild:\n  quantisation: q4_k_m\n", "line 3 quantization?"),
        ("SPK812", "version: 1\nbuild:\n  max-num-tokens: 4\n", "line 3 max_num_tokens?"),
        ("SPK812", "version: 1\nbuidl: {}\n", "line 2 build?"),
        ("SPK812", "version: 1\nbuild:\n  model: x\n", "line 3 --model"),
        ("SPK812", "version: 1\ngolden: {threshold: {}}\n", "line 2 thresholds?"),
        ("SPK812", "version: 1\npasses: {with: []}\n", "line 2 without?"),
        ("SPK813", "version: 1\nbuild: {max_num_tokens: '512'}\n", "line 2 '512' whole number"),
        ("SPK813", "version: 1\nbuild: {max_num_tokens: true}\n", "line 2 True whole number"),
        ("SPK813", "version: 1\nbuild: {quantization: 4}\n", "line 2 4 text"),
        ("SPK813", "version: 1\nbuild: {enable_streaming: 1}\n", "line 2 1 true or false"),
        ("SPK813", "version: 1\nbuild: [quantization]\n", "line 2 build mapping"),
        ("SPK813", "version: 1\npasses: {without: raise-rope}\n", "line 2 list of pass names"),
        ("SPK813", "version: 1\ngolden: {thresholds: {mean_kl: low}}\n", "line 2 mean_kl 'low'"),
        ("SPK813", "- version: 1\n", "line 1 mapping"),
        ("SPK814", "build: {}\n", "states no version 1"),
        ("SPK814", "version: 2\n", "has version 2 1"),
        ("SPK814", "version: '1'\n", "has version '1' 1"),
        ("SPK814", "version: true\n", "has version True 1"),
        ("SPK814", "", "line 1 empty"),
        ("SPK815", "version: 1\nbuild:\n  dtype: auto\n  dtype: float32\n", "line 4 line 3 dtype"),
        ("SPK811", "version: 1\nbuild: {dtype: auto\n", "line 3 YAML"),
        ("SPK811", "version: 1\nbuild:\n\tdtype: auto\n", "line 3 YAML"),
    ],
)  # fmt: skip
def test_mistakes(tmp_path: Path, code: str, text: str, words: str) -> None:
    error = refused(tmp_path, text)
    assert error.code == code
    for word in words.split(" "):
        assert word in f"{error.what} {error.remedy}", word


def test_a_recipe_is_data_not_code(tmp_path: Path) -> None:
    text = "version: 1\nbuild: {dtype: !!python/object/apply:os.getcwd []}\n"
    with pytest.raises(SpikeError, match=r"SPK811.*line 2.*python/object"):
        recipes.load(write(tmp_path, text))


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"version: \xff\xfe\n")
    with pytest.raises(SpikeError, match=r"SPK811.*utf-8"):
        recipes.load(str(path))


@pytest.mark.parametrize(
    ("name", "near"), [("smol", "smollm2-135m-q4_k_m"), ("llama3-8b-q4km", "llama3-8b-q4_k_m")]
)
def test_an_unknown_recipe_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(SpikeError) as caught:
        recipes.load(name)
    assert caught.value.code == "SPK810"
    assert f"Did you mean {near}?" in caught.value.remedy


def test_formats_in_order(tmp_path: Path) -> None:
    text = """
version: 1
formats:
  - {match: "*.down_proj.weight", layers: 0-3, format: q6_k}
  - {role: attn_v, format: q8_0}
  - {layers: 3, format: f16}
"""
    options = recipes.load(write(tmp_path, text)).options
    request = BuildRequest(**PATHS, **options)
    assert [str(override) for override in request.formats] == [
        "match *.down_proj.weight, layers 0-3", "role attn_v", "layers 3",
    ]  # fmt: skip
    assert request.options()["formats"][2] == {"format": "f16", "layers": "3"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{role: attn_v, format: q6k}", ["line 3", "format 'q6k'", "Did you mean q6_k?"]),
        ("{role: attn_w, format: q6_k}", ["line 3", "role 'attn_w'", "Did you mean attn_"]),
        ("{format: q6_k}", ["line 3", "no condition", "match, role, layers"]),
        ("{role: attn_v}", ["line 3", "no format"]),
        ("{layers: 3-1, format: f16}", ["line 3", "'3-1'", "0-3"]),
        ("{layers: last, format: f16}", ["line 3", "'last'"]),
        ("{match: '/(/', format: f16}", ["line 3", "no regular expression"]),
        ("{math: x, format: f16}", ["line 3", "SPK812", "match"]),
        ("{role: 3, format: f16}", ["line 3", "SPK813", "a text"]),
    ],
)
def test_overrides_that_mean_nothing(tmp_path: Path, entry: str, words: list[str]) -> None:
    error = refused(tmp_path, f"version: 1\nformats:\n  - {entry}\n")
    if not any(word.startswith("SPK") for word in words):
        assert error.code == "SPK820"
    for word in words:
        assert word in str(error), word
