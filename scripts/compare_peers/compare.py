"""Heads and block drafters that other projects' own classes have saved, with random weights: our drafts beside theirs.
PEERS/bin/python scripts/compare_peers/compare.py DIRECTORY [PART OF A CASE'S NAME ...]"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / each) for each in ("src", "tests", "tests/drafters", "scripts/compare_vllm")]

import tiny  # noqa: E402
from outrider_side import run  # noqa: E402
from peers import (  # noqa: E402
    Maker,
    Verifier,
    specforge_block,
    specforge_eagle3,
    speculators_block,
    speculators_eagle3,
    z_lab,
)
from sides import Case  # noqa: E402

PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [50, 60, 70], [(37 * place + 11) % 200 + 3 for place in range(41)]]
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
SECOND = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 6}
MARKOV = {"projector_type": "dspark", "markov_rank": 8}
CASES: dict[str, Maker] = {
    "z-lab-dflash": z_lab,
    "z-lab-dflash-sliding": partial(z_lab, **SLIDING),
    "z-lab-dflash2": partial(z_lab, dflash_config=SECOND, is_causal=False),
    "specforge-dflash": specforge_block,
    "specforge-dspark": partial(specforge_block, dflash_config=MARKOV),
    "specforge-dspark-gated": partial(specforge_block, dflash_config={**MARKOV, "markov_head_type": "gated"}),
    "specforge-dspark-as-its-loop": partial(specforge_block, as_its_loop=True, dflash_config=MARKOV),
    "specforge-eagle3": specforge_eagle3,
    "specforge-eagle3-fc-norm": partial(specforge_eagle3, fc_norm=True),
    "specforge-eagle3-norm-output": partial(specforge_eagle3, norm_output=True),
    "speculators-eagle3": speculators_eagle3,
    "speculators-eagle3-norms": partial(speculators_eagle3, norm_before_residual=True, norm_before_fc=True),
    "speculators-eagle3-fc-norm": partial(speculators_eagle3, fc_norm=True, norm_output=True),
    "speculators-dflash": speculators_block,
    "speculators-dflash-sliding": partial(speculators_block, layer_types=SLIDING["layer_types"], window=8),
    "speculators-dspark": partial(speculators_block, markov_rank=8),
    "speculators-dspark-gated": partial(speculators_block, markov_rank=8, markov_head_type="gated"),
}
# the same files told the other reading, where docs/doctor.md says that two programs mean different things
TOLD: dict[str, dict[str, object]] = {
    "specforge-dspark-as-its-loop": {"sample_from_anchor": False},
    "specforge-eagle3-norm-output": {"norm_output": False},
}


def compare(name: str, make: Maker, directory: Path) -> str:
    """One line: how many drafts are equal, and the first that is not."""
    target = directory / "target"
    if not target.exists():
        tiny.save_target(target, "llama", num_hidden_layers=8)
    peer = make(Verifier(target), directory / name)
    settings = {"method": peer.method, "model": str(directory / name), "num_speculative_tokens": peer.depth}
    done = run(Case(name, str(target), settings, PROMPTS, tiny.VOCAB))
    equal = total = 0
    first = ""
    with torch.inference_mode():
        for text, drafts in zip(done["texts"], done["drafts"], strict=True):
            for length, ours in drafts.items():
                theirs = peer.draft(text[:length])[: len(ours)]
                total, equal = total + 1, equal + (ours == theirs)
                if ours != theirs and not first:
                    first = f"; after {length} tokens {ours}, theirs {theirs}"
    return f"{name}: {equal} of {total} drafts equal{first}"


def told_otherwise(directory: Path, keys: dict[str, object]) -> None:
    import json

    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def main() -> None:
    directory, names = Path(sys.argv[1]), sys.argv[2:]
    for name, make in CASES.items():
        if names and not any(part in name for part in names):
            continue
        try:
            print(compare(name, make, directory), flush=True)
            if name in TOLD:
                keys = TOLD[name]

                def again(verifier: Verifier, path: Path, make: Maker = make, keys: dict[str, object] = keys) -> object:
                    peer = make(verifier, path)
                    told_otherwise(path, keys)
                    return peer

                print(f"  told {keys}: {compare(name, again, directory)}", flush=True)  # type: ignore[arg-type]
        except Exception as error:  # of one project; the others are still to be compared
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


if __name__ == "__main__":
    main()
