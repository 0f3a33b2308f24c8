"""Opening a checkpoint: a directory of safetensors, a hub id, or a GGUF file, all behind one small interface.
Reading is strict: what is missing, truncated or malformed is named together with its remedy; pickle is never loaded."""

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from outrider.checkpoints.config_check import checked_config
from outrider.checkpoints.gguf import GgufCheckpoint
from outrider.checkpoints.gguf_tokenizer import build_tokenizer
from outrider.checkpoints.quantised import dequantised
from outrider.tokenizer import Tokenizer, read_json_object
from outrider.types import Checkpoint

INDEX_NAME = "model.safetensors.index.json"
HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.txt"]
HUB_EXCLUDED = ["*/*.safetensors", "*/*.json", "*/*.txt"]  # other models in subfolders: adapters, onnx, originals
NARROW = {"BF16": torch.bfloat16, "F16": torch.float16}
PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens a directory, a .gguf file, or a hub id such as "org/name". Quantised weights are shown as dense ones."""
    path = Path(source).expanduser()
    if path.is_dir():
        return dequantised(SafetensorsCheckpoint(path))
    if path.is_file():
        return _open_file(path)
    if isinstance(source, str) and is_hub_id(source):
        return dequantised(_open_from_hub(source))
    raise ValueError(f"{source} does not exist; give a checkpoint directory, a .gguf file, or a hub id like org/name")


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that a checkpoint carries, or None."""
    if isinstance(checkpoint, GgufCheckpoint):
        return build_tokenizer(checkpoint.metadata)
    return Tokenizer.from_directory(checkpoint.path)


class SafetensorsCheckpoint:
    """A directory with config.json and one or more safetensors files, whose tensors are mapped and not read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not (path / "config.json").is_file():
            raise ValueError(f"{path / 'config.json'} is missing; {_advice_on_directory(path)}")
        self.config = checked_config(read_json_object(path / "config.json"), path / "config.json")
        generation = path / "generation_config.json"
        self.generation_config = read_json_object(generation) if generation.is_file() else {}
        self._files = ExitStack()
        self._opened: dict[str, safe_open] = {}
        try:
            self._file_names = self._open_files()
        except BaseException:
            self._files.close()
            raise

    def names(self) -> list[str]:
        return list(self._file_names)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """What a tensor's numbers are stored as, where they have 16 bits."""
        return NARROW.get(self._file_of(name).get_slice(name).get_dtype())

    def tensor(self, name: str) -> torch.Tensor:
        return self._file_of(name).get_tensor(name)

    def part(self, name: str, dim: int, begin: int, end: int) -> torch.Tensor:
        """What lies between two places along a dimension; nothing else is read."""
        return self._file_of(name).get_slice(name)[(slice(None),) * dim + (slice(begin, end),)]

    def file_name(self, name: str) -> str:
        """Of the file that holds a tensor."""
        if name not in self._file_names:
            raise ValueError(f"{self.path} has no tensor {name!r}; check that the checkpoint is the one you mean")
        return self._file_names[name]

    def close(self) -> None:
        self._file_names, self._opened = {}, {}
        self._files.close()

    def _file_of(self, name: str) -> safe_open:
        return self._opened[self.file_name(name)]

    def _open_files(self) -> dict[str, str]:
        """The name of every tensor's file, all of which are open then."""
        single, index = self.path / "model.safetensors", self.path / INDEX_NAME
        if not single.is_file() and index.is_file():
            return self._open_indexed(index)
        files = [single] if single.is_file() else sorted(self.path.glob("*.safetensors"))
        if not files:
            raise ValueError(f"{self.path} holds no safetensors; {_advice_on_directory(self.path)}")
        found = [(name, file.name) for file in files for name in self._open(file).keys()]  # noqa: SIM118
        repeated = [name for name, count in Counter(name for name, _ in found).items() if count > 1]
        if repeated:
            raise ValueError(f"{self.path} holds {repeated[0]!r} in two files; remove one, or add {INDEX_NAME}")
        return dict(found)

    def _open_indexed(self, index: Path) -> dict[str, str]:
        shard_of = _read_index(index)
        held = {shard: set(self._open(self.path / shard).keys()) for shard in sorted(set(shard_of.values()))}
        for name, shard in shard_of.items():
            if name not in held[shard]:
                raise ValueError(
                    f"{self.path / shard} lacks {name!r}, which {INDEX_NAME} promises; download both again"
                )
        return dict(shard_of)

    def _open(self, file: Path) -> safe_open:
        if not file.is_file():
            raise ValueError(f"{file} is missing, but {INDEX_NAME} names it; download the file")
        try:
            opened = self._files.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is truncated or damaged ({error}); download the file again") from error
        self._opened[file.name] = opened
        return opened


def _read_index(index: Path) -> Mapping[str, str]:
    shard_of = read_json_object(index).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of:
        raise ValueError(f"{index} has no weight_map; download the file again")
    for shard in shard_of.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ValueError(f"{index} names the shard {shard!r}, which is no plain file name; download the file again")
    return shard_of


def _advice_on_directory(path: Path) -> str:
    if not path.is_dir():
        return "give a checkpoint directory"
    if any(path.glob("*.safetensors")):
        return "download it from where the weights came from"
    if any(path.glob("*.gguf")):
        return "to read a GGUF, give the path of the .gguf file itself"
    if any(file.suffix in PICKLE_SUFFIXES for file in path.iterdir()):
        return "its weights are pickled, and pickle is never loaded: convert them to safetensors"
    return "give a directory with config.json and *.safetensors"


def _open_file(path: Path) -> Checkpoint:
    if path.suffix in PICKLE_SUFFIXES:
        raise ValueError(f"{path} is pickled, and pickle is never loaded; convert it to safetensors")
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} is one file of a checkpoint; give its directory, which also holds config.json")
    return GgufCheckpoint(path)


def is_hub_id(source: str) -> bool:
    """Whether a name has the form of a hub id, org/name."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", source) is not None and not source.endswith(".gguf") and source[0] != "."


def _open_from_hub(name: str) -> Checkpoint:
    try:
        return SafetensorsCheckpoint(_fetch(name, local_files_only=True))
    except (OSError, ValueError):  # not downloaded yet, or not all of it
        pass
    try:
        path = _fetch(name, local_files_only=False)
    except Exception as error:  # the hub's client raises its own, its transport's and the system's errors
        reason = str(error).split("\n", 1)[0]
        raise ValueError(
            f"{name} is no local path and cannot be fetched from the hub ({reason}); "
            "check the name, the network and your login, or download it and give the directory"
        ) from error
    return SafetensorsCheckpoint(path)


def _fetch(name: str, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download  # slow to import, and local checkpoints do without it

    return Path(
        snapshot_download(
            name, allow_patterns=HUB_PATTERNS, ignore_patterns=HUB_EXCLUDED, local_files_only=local_files_only
        )
    )
