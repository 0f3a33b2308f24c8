"""config.json is looked at in one place: whatever is in it, it works or is refused by a ValueError that names a key."""

from __future__ import annotations

import ast
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from config_mutations import Subject, faults_of, subjects

import outrider
from outrider.checkpoints.config_check import KEYS, checked_config

SOURCE = Path(outrider.__file__).parent
READERS = [
    *sorted((SOURCE / "models").glob("*.py")),
    *(SOURCE / "drafters" / f"{name}.py" for name in ("feedback", "eagle", "eagle3", "eagle3_config", "dflash_config")),
    *(SOURCE / "drafters" / f"{name}.py" for name in ("dflash_layers", "dflash2", "dspark", "p_eagle", "draft_model")),
    *(SOURCE / "layers" / f"{name}.py" for name in ("rotary", "mla")),
    SOURCE / "pair.py",
]
CALLS = {"get", "require", "refuse", "of_layers", "found"}
# what is read by these words and needs no entry: compared with what is supported, checked elsewhere, or no key at all
OTHER = {
    # any type: refuse() names them
    "mamba_proj_bias", "residual_in_fp32", "use_rope_layers", "gating", "zero_centered", "sink", "use_moe",
    # checked where they are read
    "quantization_config", "quant_method", "speculators_config", "proposal_methods", "speculative_tokens", "__float__",
    "verifier", "name_or_path",
    # values that are supported, and what is no config
    "silu", "swish", "relu2", "vision", "greedy", "group_limited_greedy", "noaux_tc", "softmax", "sigmoid",
    "image_grid_thw", "taps",
    # layers by kind, made by ourselves
    "theta", "mamba", "attention", "mlp", "moe",
}  # fmt: skip


def read_in(path: Path) -> set[str]:
    """Constant keys that a file asks configs for."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        given: list[ast.expr] = []
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            of_reader = name == "get" and ast.unparse(node.func) == "reader.get"  # a field under several names
            given = node.args if of_reader or name in CALLS - {"get"} else node.args[:1] if name == "get" else []
        elif isinstance(node, ast.Subscript):
            given = [node.slice]
        found |= {each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)}
    return found


def test_every_key_that_is_read_is_in_the_table() -> None:
    for path in READERS:
        asked = {key for key in read_in(path) if re.fullmatch(r"[a-z_][a-z0-9_]*", key)}  # others are tensors' names
        unknown = asked - KEYS.keys() - OTHER
        assert not unknown, f"{path.name} reads {sorted(unknown)}: say in checkpoints/config_check.py what they may be"


@pytest.fixture(scope="module")
def all_subjects(tmp_path_factory: pytest.TempPathFactory) -> list[Subject]:
    return list(subjects(tmp_path_factory.mktemp("subjects")))


def test_mutations(all_subjects: list[Subject], tmp_path: Path) -> None:
    """Some of them, for every family and drafter; tests/config_mutations.py tries all."""
    chance, total, faults = random.Random(19), 0, []
    for subject in all_subjects:
        count, found = faults_of(subject, tmp_path / subject.name, chance, 0.015)
        total, faults = total + count, faults + found
    assert not faults, "\n".join(faults)
    assert total > 200  # of 20,000


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"hidden_size": "64"}, r"hidden_size must be a whole number at least 1 and at most .*, not '64'"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": 64.5}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
        ({"layer_types": ["full_attention", 3]}, "layer_types must be a list, each entry text"),
        ({"text_config": {"rope_scaling": {"factor": []}}}, r"text_config\.rope_scaling\.factor"),
        ({"per_layer_config": {"3": {"head_dim": "x"}}}, r"per_layer_config\.3\.head_dim"),
        ({"per_layer_config": {"3": 4}}, r"per_layer_config\.3"),
        ({"vision_config": {"spatial_merge_size": 0}}, r"vision_config\.spatial_merge_size"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
        ({"architectures": {"a" * 500: 1}}, r"architectures must be .*a\.\.\.; repair"),
    ],
)
def test_what_is_wrong_is_named(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"^here: {said}"):
        checked_config(config, "here")


def test_what_is_right_stays() -> None:
    config = {
        "hidden_size": 64,
        "eos_token_id": [1, 2],
        "sliding_window": None,
        "rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}},
        "vision_config": {"hidden_size": "read by others", "depth": None},
        "unknown": {"hidden_size": "of no meaning here"},
        "swiglu_limits": [None, 0.5],
        "moe_layers_enum": "1,2",
    }
    assert checked_config(config, "here") == config
    nulls = {"rope_theta": None, "text_config": None, "rope_scaling": {"factor": None}, "head_dim": None}
    assert checked_config(nulls, "here") == {"rope_scaling": {}, "head_dim": None}
