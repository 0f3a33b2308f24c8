"""What a run was asked for. Whatever can be found wrong without loading a weight is refused here."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from outrider.config import device_of
from outrider.drafters.base import Drafter, drafters
from outrider.kernels.head_loss import Divergence
from outrider.models.base import Target
from outrider.training.dialects import DIALECTS
from outrider.training.optimizer import Rates
from outrider.training.regenerate import Regeneration

LOSSES = {
    "kl": Divergence(1.0, 0.0),
    "ce": Divergence(0.0, 1.0),
    "mixed": Divergence(0.5, 0.5),
    "lk": Divergence(1.0, 0.0, lk=True),
}


@dataclass(frozen=True)
class TrainOptions:
    method: str
    target: str | Path
    data: tuple[Path, ...]
    out: Path
    minutes: float | None = None
    max_steps: int | None = None
    depth: int = 5
    num_layers: int | None = None
    intermediate_size: int | None = None
    taps: tuple[int, ...] | None = None
    post_norm: bool = False
    warm: bool = True
    init: Path | None = None  # a drafter to go on from
    window: int = 0
    draft_vocabulary: int | None = None
    train_vocabulary: bool = False
    loss: str = "mixed"
    row_len: int | None = None
    tokens_per_step: int | None = None
    rates: Rates = field(default_factory=Rates)
    regenerate: bool = True
    texts: tuple[Path, ...] = ()  # of earlier runs, to learn from: nothing is generated
    texts_only: bool = False
    draft: str | None = None  # a drafter that helps the target answer: the same texts, in fewer rounds
    samples: int = 1  # answers to each prompt
    generate_minutes: float | None = None
    answers: Regeneration = field(default_factory=Regeneration)
    num_held_out: int = 40
    validation_tokens: int = 96
    num_validations: int = 8
    patience: int = 5
    dialect: str = "original"
    resume: bool = False
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    limit: int | None = None  # conversations to read of each file
    threads: int | None = None
    num_ranks: int = 1  # processes that share the target

    def __post_init__(self) -> None:
        if not self.answers.max_len:  # a text is as long as a row
            object.__setattr__(self, "answers", replace(self.answers, max_len=self.row_length))
        if self.texts_only and (self.minutes, self.max_steps, self.texts) != (None, None, ()):
            raise ValueError("--texts-only trains nothing: leave out --minutes, --max-steps and --texts")
        if self.draft is not None and (self.texts or not self.regenerate):
            raise ValueError("--draft helps the target answer, and it is asked nothing here: leave out --draft")
        if not self.texts_only and (self.minutes is None) == (self.max_steps is None):
            raise ValueError("say how long to train: --minutes N or --max-steps N")
        if self.minutes is not None and self.minutes <= 0:
            raise ValueError(f"--minutes must be above 0, not {self.minutes:g}")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"--max-steps must be at least 1, not {self.max_steps}")
        if self.loss not in LOSSES:
            raise ValueError(f"--loss must be one of {', '.join(LOSSES)}, not {self.loss!r}")
        if self.dialect not in DIALECTS:
            raise ValueError(f"--dialect must be one of {', '.join(DIALECTS)}, not {self.dialect!r}")
        if self.row_length % 16 or self.row_length < 32:
            raise ValueError(f"--row-len must be a multiple of 16 from 32, not {self.row_length}")
        if self.intermediate_size is not None and self.intermediate_size < 1:
            raise ValueError(f"--intermediate-size must be at least 1, not {self.intermediate_size}")
        if not 1 <= self.depth <= 32:
            raise ValueError(f"--depth must be from 1 to 32, not {self.depth}")
        if self.num_ranks < 1:
            raise ValueError(f"--tensor-parallel-size must be at least 1, not {self.num_ranks}")
        trainable_method(self.method)

    @property
    def torch_device(self) -> torch.device:
        return device_of(self.device)

    @property
    def row_length(self) -> int:
        return self.row_len or (1024 if self.torch_device.type == "cuda" else 256)

    @property
    def num_rows(self) -> int:
        """Of a step."""
        tokens = self.tokens_per_step or (16384 if self.torch_device.type == "cuda" else 2048)
        return max(tokens // self.row_length, 1)

    def identity(self) -> dict[str, Any]:
        """What a run that is resumed must have in common with the one that was broken off."""
        names = ("method", "depth", "num_layers", "intermediate_size", "post_norm", "draft_vocabulary",
                 "train_vocabulary", "loss", "seed")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {**found, "row_len": self.row_length, "rows": self.num_rows, "target": str(self.target)}

    def source(self) -> dict[str, Any]:
        """What the texts depend on."""
        return {
            "target": str(self.target),
            "data": [str(path) for path in self.data],
            "limit": self.limit,
            "regenerate": self.regenerate,
            "texts": [str(path) for path in self.texts],
            "samples": self.samples,
            "held_out": self.num_held_out,
            "answers": {**asdict(self.answers), "temperatures": list(self.answers.temperatures)},
        }


def trainable_method(name: str) -> type[Drafter]:
    able = [each for each in drafters if drafters[each].trainable]
    if name not in able:
        known = "has nothing to train" if name in drafters else "is no method"
        raise ValueError(f"{name!r} {known}: outrider train knows {', '.join(able)}")
    return drafters[name]


def parts_of(options: TrainOptions, target: Target, num_processes: int = 1) -> int:
    """In how many parts the rows of a step must be read, so that there is room for them; before anything is loaded."""
    room = _room(options.torch_device)
    row = _row_bytes(options, target)
    if row > room:
        raise ValueError(
            f"there is no room for one row of {options.row_length} tokens: it takes about {row / 2**30:.1f} GiB, and "
            f"{room / 2**30:.1f} GiB are free: lower --row-len or --depth, or free memory"
        )
    mine = -(-options.num_rows // num_processes)
    return min(math.ceil(mine * row / room), mine)


def _row_bytes(options: TrainOptions, target: Target) -> int:
    """About what one row takes until its gradients are known: states of every draft step, masks of attention over the
    row, the target's states and its keys and values."""
    text = target.config.get("text_config") or target.config
    size = target.hidden_size
    inner = options.intermediate_size or int(text.get("intermediate_size") or 4 * size)
    passes, layers, length = options.depth, options.num_layers or 1, options.row_length
    states = 4 * passes * (layers * (12 * size + 4 * inner) + 6 * size)
    attention = 3 * passes * layers * length
    of_target = 4 * (target.num_layers * 2 * size + 8 * size)
    return length * (states + attention + of_target)


def _room(device: torch.device) -> int:
    """Half of what is free: the rest is for weights, the engine that validates, and logits."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] // 2
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 2**32
    return free // 2
