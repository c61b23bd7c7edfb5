"""Weights, tokenizer and defaults come from a folder, or at random from a config."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from cbgen.engine.config import ModelConfig
from cbgen.engine.cpu.decoder import FusedDecoder
from cbgen.engine.cpu.linears import unpack_linears
from cbgen.engine.model.loader import load_model, resolve_device
from cbgen.errors import UsageError
from tests.helpers.models import tiny_model
from tests.helpers.tiny_checkpoint import save_tiny_checkpoint

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A saved tiny model, without tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(path)
    defaults = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [5, 6]}
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def load(folder: Path, **settings):
    return load_model(ModelConfig(path=str(folder), device="cpu", **settings))


def weights_of(loaded) -> dict[str, torch.Tensor]:
    """Return the weights of a loaded model, packed ones as they were before."""
    decoder = loaded.model.get_decoder()
    if isinstance(decoder.layers[0], FusedDecoder):
        decoder.layers = nn.ModuleList(decoder.layers[0].layers)
    unpack_linears(loaded.model)
    return loaded.model.state_dict()


def test_a_folder_gives_its_weights(folder):
    loaded = weights_of(load(folder))
    saved = tiny_model("llama").state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_a_loaded_model_is_ready_to_answer(folder):
    model = load(folder).model
    assert not model.training
    assert (model.device, model.dtype) == (CPU, torch.float32)


def test_generation_defaults_and_end_tokens_are_read(folder):
    loaded = load(folder)
    assert loaded.generation_defaults["temperature"] == 0.6
    assert loaded.generation_defaults["do_sample"] is True
    assert loaded.eos_token_ids == {5, 6}


def test_end_tokens_of_config_generation_config_and_tokenizer_all_count(tmp_path):
    folder = save_tiny_checkpoint(tmp_path)  # 1 ends in its config.json
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer["eos_token"] = "<|assistant|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert load(folder).eos_token_ids == {1, 3, 5, 6}


def test_a_folder_without_tokenizer_has_none(folder, caplog):
    with caplog.at_level(logging.INFO, logger="cbgen"):
        assert load(folder).tokenizer is None
    assert "has no tokenizer" in caplog.text


def test_a_broken_tokenizer_is_refused_not_ignored(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError, match="cannot load model"):
        load(broken)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '"text"'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}, "decoder": 1}'),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "[1]"),
        ("config.json", "[]"),
    ],
)
def test_a_file_whose_values_a_library_cannot_take_is_refused(tmp_path, name, content):
    folder = save_tiny_checkpoint(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(UsageError, match="cannot load model"):
        load(folder)


def test_the_dtype_may_be_chosen(folder):
    assert load(folder, dtype="bfloat16").model.dtype is torch.bfloat16


def test_config_fields_may_be_overridden(folder):
    loaded = load(folder, config_overrides={"num_hidden_layers": 1}, random_init=True)
    assert len(loaded.model.model.layers) == 1


def test_an_unknown_config_field_is_refused_by_name(folder):
    with pytest.raises(UsageError, match=r"config_overrides.no_such: .* 'llama' has no field"):
        load(folder, config_overrides={"no_such": 1})


def test_random_weights_are_the_same_each_time_and_not_the_saved_ones(folder):
    first, second = (weights_of(load(folder, random_init=True)) for _ in range(2))
    name = "model.embed_tokens.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], tiny_model("llama").state_dict()[name])


@pytest.mark.parametrize("random_init", [False, True])
def test_loading_does_not_move_the_callers_generator(folder, random_init):
    before = torch.get_rng_state()
    load(folder, random_init=random_init)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/no/such/folder", r"model.path is '/no/such/folder', and there is no such folder"),
        ("./no/such", r"model.path is './no/such', and there is no such folder"),
        ("~/no/such.gguf", r"model.path is '~/no/such.gguf', and there is no such file"),
    ],
)
def test_a_missing_path_is_named(path, message):
    with pytest.raises(UsageError, match=message):
        load_model(ModelConfig(path=path, device="cpu"))


def test_a_folder_without_a_model_is_refused_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match="cannot load model") as caught:
        load(tmp_path)
    assert caught.value.__cause__ is not None


def test_an_unknown_architecture_is_refused_with_the_reason(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    with pytest.raises(UsageError, match=r"cannot load model .*no_such_model"):
        load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"damaged", None])
def test_damaged_weights_are_refused_with_the_reason(folder, tmp_path, content):
    weights = (folder / "model.safetensors").read_bytes()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(weights[:-100] if content is None else content)
    with pytest.raises(UsageError, match="cannot load model"):
        load(tmp_path)


@pytest.mark.parametrize("changes", [{"hidden_size": "abc"}, {"num_attention_heads": 5}])
def test_a_config_with_wrong_values_is_refused_with_the_reason(folder, tmp_path, changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="cannot load model"):
        load(tmp_path, random_init=True)


def test_a_config_override_of_a_wrong_type_is_refused(folder):
    with pytest.raises(UsageError, match="num_hidden_layers"):
        load(folder, config_overrides={"num_hidden_layers": "two"})


def test_weights_that_the_checkpoint_lacks_are_not_made_up(folder):
    with pytest.raises(UsageError, match="cannot load model"):
        load(folder, config_overrides={"num_hidden_layers": 3})


def test_environment_variables_in_the_path_are_expanded(folder, monkeypatch):
    monkeypatch.setenv("TINY_MODEL", str(folder))
    assert load_model(ModelConfig(path="$TINY_MODEL", device="cpu")).eos_token_ids == {5, 6}


def test_without_gpu_auto_is_the_cpu_and_cuda_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == CPU
    with pytest.raises(UsageError, match=r"model.device is 'cuda', but torch .* sees no GPU"):
        resolve_device("cuda")


def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == GPU
    assert resolve_device("cuda") == GPU
    with pytest.raises(UsageError, match="GPUs 0 to 1 exist"):
        resolve_device("cuda:2")
