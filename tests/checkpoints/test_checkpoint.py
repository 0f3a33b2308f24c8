"""Checkpoints in directories and on the hub: what they hold, and that whatever is wrong with one is named."""

import json
import pickle
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from outrider.checkpoints.checkpoint import Checkpoint, load_tokenizer, open_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}
INDEX = "model.safetensors.index.json"


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.embed_tokens.weight": torch.randn(5, 4, generator=generator),
        "model.norm.weight": torch.randn(4, generator=generator).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(8, 4, generator=generator).to(torch.float8_e4m3fn),
        "model.layers.0.mlp.up_proj.bias": torch.arange(8),
    }


def write_single(path: Path, name: str = "model.safetensors") -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), path / name)
    return path


def write_sharded(path: Path) -> Path:
    (path / "config.json").write_text(json.dumps(CONFIG))
    tensors = list(weights().items())
    shards = {
        "model-00001-of-00002.safetensors": dict(tensors[:2]),
        "model-00002-of-00002.safetensors": dict(tensors[2:]),
    }
    for shard, held in shards.items():
        save_file(held, path / shard)
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return path


def write_unindexed(path: Path) -> Path:
    write_sharded(path)
    (path / INDEX).unlink()
    return path


def write_oddly_named(path: Path) -> Path:
    return write_single(path, "drafter.safetensors")


@pytest.mark.parametrize("write", [write_single, write_sharded, write_unindexed, write_oddly_named])
@pytest.mark.parametrize("as_type", [str, Path])
def test_a_directory_holds_what_was_saved(tmp_path: Path, write, as_type) -> None:
    checkpoint: Checkpoint = open_checkpoint(as_type(write(tmp_path)))
    assert checkpoint.path == tmp_path
    assert checkpoint.config == CONFIG
    assert checkpoint.generation_config == {}
    assert sorted(checkpoint.names()) == sorted(weights())
    for name, expected in weights().items():
        tensor = checkpoint.tensor(name)
        assert checkpoint.shape(name) == tuple(expected.shape)
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match=r"no tensor 'lm_head\.weight'"):
        checkpoint.tensor("lm_head.weight")
    checkpoint.close()


def test_generation_config_is_read(tmp_path: Path) -> None:
    write_single(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(tmp_path).generation_config == {"eos_token_id": [1, 2]}


def test_tensors_outlive_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path))
    tensor = checkpoint.tensor("model.embed_tokens.weight")
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(tensor, weights()["model.embed_tokens.weight"])
    with pytest.raises(ValueError, match="no tensor"):
        checkpoint.tensor("model.embed_tokens.weight")


def test_what_transformers_saves_in_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / INDEX).is_file()
    checkpoint = open_checkpoint(tmp_path)
    expected = model.state_dict()
    assert sorted(checkpoint.names()) == sorted(expected)
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in expected.items())
    assert checkpoint.config["num_hidden_layers"] == 2


# What is wrong is named


def fails(path: Path, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_checkpoint(path)
    for word in words:
        assert word in str(caught.value)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    file = write_single(tmp_path) / "model.safetensors"
    content = file.read_bytes()
    for length in [*range(16), *range(16, len(content), 7), len(content) - 1]:
        file.write_bytes(content[:length])
        fails(tmp_path, str(file), "truncated or damaged", "download")


@pytest.mark.parametrize("content", [b"\xff" * 64, b"GGUF" * 20, (8).to_bytes(8, "little") + b"[1,2,3] "])
def test_a_file_that_is_no_safetensors(tmp_path: Path, content: bytes) -> None:
    file = write_single(tmp_path) / "model.safetensors"
    file.write_bytes(content)
    fails(tmp_path, str(file), "damaged")


def test_a_truncated_shard(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path) / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    fails(tmp_path, str(shard), "download")


def test_a_missing_shard(tmp_path: Path) -> None:
    shard = write_sharded(tmp_path) / "model-00002-of-00002.safetensors"
    shard.unlink()
    fails(tmp_path, str(shard), "missing", "download")


def test_an_index_that_names_a_tensor_its_shard_lacks(tmp_path: Path) -> None:
    index = write_sharded(tmp_path) / INDEX
    content = json.loads(index.read_text())
    content["weight_map"]["lm_head.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    fails(tmp_path, "model-00001-of-00002.safetensors", "'lm_head.weight'", "download")


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": "../model.safetensors"}, {"a": 3}, {"a": "/etc/passwd"}])
def test_an_index_that_makes_no_sense(tmp_path: Path, weight_map: object) -> None:
    index = write_sharded(tmp_path) / INDEX
    index.write_text(json.dumps({"weight_map": weight_map}))
    fails(tmp_path, str(index), "download")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    write_single(write_unindexed(tmp_path), "extra.safetensors")
    fails(tmp_path, "two files", "model.embed_tokens.weight")


def test_a_missing_config(tmp_path: Path) -> None:
    (write_single(tmp_path) / "config.json").unlink()
    fails(tmp_path, str(tmp_path / "config.json"), "missing", "download")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("content", ["{", "[]", '{"a": }', "\x00", "[" * 100_000])
def test_invalid_json(tmp_path: Path, name: str, content: str) -> None:
    (write_sharded(tmp_path) / name).write_text(content)
    fails(tmp_path, str(tmp_path / name), "download")


def test_a_pickled_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    fails(tmp_path, str(tmp_path), "pickle is never loaded", "convert them to safetensors")
    fails(tmp_path / "pytorch_model.bin", "pickle is never loaded")


def test_a_directory_without_weights(tmp_path: Path) -> None:
    fails(tmp_path, "config.json and *.safetensors")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    fails(tmp_path, ".gguf file itself")


def test_one_file_of_a_checkpoint(tmp_path: Path) -> None:
    fails(write_single(tmp_path) / "model.safetensors", "give its directory")


@pytest.mark.parametrize(
    "source", ["/no/such/place", "./missing", "no-slash", "a/b/c", "org/missing.gguf", Path("a/b")]
)
def test_a_path_that_is_not_there(source: str | Path) -> None:
    fails(source, str(source), "does not exist", "hub id")


# The hub


class Hub:
    """Stands in for the hub: a directory that is, or is not, downloaded already."""

    def __init__(self, path: Path, *, local: bool, reachable: bool) -> None:
        self.path, self.local, self.reachable = path, local, reachable
        self.calls: list[bool] = []

    def snapshot_download(self, name: str, *, allow_patterns, ignore_patterns, local_files_only: bool) -> str:
        assert name == "org/name"
        assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in allow_patterns)
        self.calls.append(local_files_only)
        if local_files_only and not self.local:
            raise huggingface_hub.errors.LocalEntryNotFoundError("nothing here")
        if not local_files_only and not self.reachable:
            raise ConnectionError("no route to the hub\nmore")
        return str(self.path)


def test_a_downloaded_model_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(write_single(tmp_path), local=True, reachable=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert open_checkpoint("org/name").config == CONFIG
    assert hub.calls == [True]


def test_a_new_model_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(write_single(tmp_path), local=False, reachable=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    assert open_checkpoint("org/name").config == CONFIG
    assert hub.calls == [True, False]


def test_a_half_downloaded_model_is_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    hub = Hub(tmp_path, local=True, reachable=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(ValueError, match="holds no safetensors"):
        open_checkpoint("org/name")
    assert hub.calls == [True, False]


def test_an_unreachable_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path, local=False, reachable=False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    with pytest.raises(ValueError, match=r"org/name .* cannot be fetched .*no route to the hub\).*give the directory"):
        open_checkpoint("org/name")


# Its tokenizer


def test_the_tokenizer_of_a_directory(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    checkpoint = open_checkpoint(write_single(tmp_path))
    assert load_tokenizer(checkpoint) is None
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    assert tokenizer.encode("ab") == [0, 1]
