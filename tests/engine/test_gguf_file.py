"""While a GGUF file is loaded, what transformers uses to read it is fast, and returns the same."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from cbgen.engine.model.gguf import reading_once

gguf = pytest.importorskip("gguf")
transformers_gguf = pytest.importorskip("transformers.modeling_gguf_pytorch_utils")

TOKENS = ["<s>", "a", "é", "日本", ""]
PATCHED = ("GGUFReader", "get_tensor_name_map", "dequantize")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A file with every kind of metadata and a quantized tensor."""
    file = str(tmp_path_factory.mktemp("gguf") / "tiny.gguf")
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_context_length(32)
    writer.add_embedding_length(32)
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.5, -1.25, 0.0, 3.0, 1e-7])
    writer.add_token_types([1, 1, 1, 1, 3])
    writer.add_array("general.flags", [True, False])
    writer.add_add_bos_token(True)
    values = np.random.default_rng(0).standard_normal((64, 96), dtype=np.float32)
    quantized = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output.weight", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", values[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def metadata(path: str) -> dict:
    reader = gguf.GGUFReader(path)
    return {name: transformers_gguf.read_field(reader, name) for name in reader.fields}


def test_metadata_are_the_same(path):
    usual = metadata(path)
    with reading_once():
        assert metadata(path) == usual
    assert usual["tokenizer.ggml.tokens"] == TOKENS


def test_what_transformers_makes_of_a_file_is_the_same(path):
    usual = transformers_gguf.load_gguf_checkpoint(path)
    with reading_once():
        assert transformers_gguf.load_gguf_checkpoint(path) == usual


def test_tensors_have_the_same_bits(path):
    def tensors() -> dict:
        reader = gguf.GGUFReader(path)
        return {each.name: gguf.dequantize(each.data, each.tensor_type) for each in reader.tensors}

    usual = tensors()
    with reading_once():
        fast = tensors()
    assert usual.keys() == fast.keys() == {"output.weight", "output_norm.weight"}
    assert all(np.array_equal(usual[name], fast[name]) for name in usual)


def test_a_file_is_parsed_once_and_so_is_the_map_of_names(path):
    llama = gguf.MODEL_ARCH.LLAMA
    with reading_once():
        assert gguf.GGUFReader(path) is gguf.GGUFReader(path)
        assert gguf.get_tensor_name_map(llama, 1) is gguf.get_tensor_name_map(llama, 1)


def test_no_progress_bar_is_drawn(capfd):
    with reading_once():
        assert list(transformers_gguf.tqdm([1, 2], desc="Converting")) == [1, 2]
    assert capfd.readouterr().err == ""


def test_everything_is_put_back_even_after_a_failure():
    before = [getattr(gguf, name) for name in PATCHED], dict(vars(transformers_gguf))

    def fail() -> None:
        with reading_once():
            assert [getattr(gguf, name) for name in PATCHED] != before[0]
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert ([getattr(gguf, name) for name in PATCHED], dict(vars(transformers_gguf))) == before


def test_without_the_library_nothing_happens(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with reading_once():
        pass
