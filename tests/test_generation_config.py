"""What a checkpoint's generation_config.json says about sampling, as vLLM reads it."""

import json
from pathlib import Path

import pytest

from outrider.generation_config import default_sampling


def write(path: Path, **values: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


def test_what_is_read(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == {}
    assert default_sampling(tmp_path / "model.gguf") == {}
    write(
        tmp_path, temperature=0.6, top_p=0.95, top_k=20, min_p=None, max_new_tokens=77, do_sample=True, eos_token_id=2
    )
    expected = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 77}
    assert default_sampling(tmp_path) == expected
    assert default_sampling(str(tmp_path / "generation_config.json")) == expected


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_k": 1.5}, {"top_p": True}, {"max_new_tokens": []}])
def test_what_is_no_number_is_refused_by_name(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        default_sampling(write(tmp_path, **values))
