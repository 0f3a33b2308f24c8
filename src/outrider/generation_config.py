"""What generation_config.json, which comes with a checkpoint, says about sampling: its authors' defaults."""

from __future__ import annotations

from pathlib import Path

from outrider.tokenizer import read_json_object

# what vLLM reads; a request says max_tokens where the file says max_new_tokens
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
_WHOLE = ("top_k", "max_new_tokens")


def default_sampling(path: Path | str) -> dict[str, float | int]:
    """The sampling settings that a checkpoint comes with, by the file's own names; a key that is null or missing is
    left out. `path`: the checkpoint's directory, or the file itself; without such a file (as beside a .gguf) there are
    none."""
    path = Path(path)
    file = path if path.name == "generation_config.json" else path / "generation_config.json"
    if not file.is_file():
        return {}
    content = read_json_object(file)
    found = {name: content[name] for name in SAMPLING_KEYS if content.get(name) is not None}
    for name, value in found.items():
        kinds = (int,) if name in _WHOLE else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool):
            what = "a whole number" if name in _WHOLE else "a number"
            raise ValueError(f"{file}: {name} must be {what}, not {value!r}; correct the file or leave the key out")
    return found
