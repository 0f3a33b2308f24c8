"""What every target is: embedding, a stack of layers, a final norm and a head, with taps collected in one loop.
A target file knows one architecture: its config, its network and its tensor names. It holds no speculative code."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.kernels.take import take_rows
from outrider.layers.attention import SelfAttention
from outrider.layers.embedding import AbsentHead, Embedding, Head, embed_rows
from outrider.layers.fused import FusedLayers
from outrider.layers.mtp import MtpModule
from outrider.layers.split import whole_shape
from outrider.layers.stage import Stage
from outrider.registry import Registry
from outrider.types import Batch, Hidden, ReadRows, Weight

targets: Registry[type["Target"]] = Registry("target architecture", "outrider.targets")


@dataclass(frozen=True)
class Mtp:
    """The multi-token-prediction modules in a target's checkpoint, with the family's facts about them. Drafters build,
    load and run them; the target never does."""

    num_modules: int
    build: Callable[[int], MtpModule]  # module k, its parameters still empty
    weights: Callable[[int, MtpModule], dict[str, Weight]]  # its parameters' names, and the tensors they are made of
    reads_normed: bool  # module 0 takes the target's hidden state after the final norm, else before it
    feeds_normed: bool  # what is fed back, or to the next module, is the module's output after its norm
    chained: bool = True  # module k + 1 takes module k's output, else the target's hidden state like module 0
    zero_first_embedding: bool | None = None  # at position 0; None: no engine of the family does, so nobody asks
    copies: tuple[str, ...] = ()  # patterns of the modules' tensors that are the target's own, stored again


@dataclass(frozen=True)
class Vision:
    """How images enter a prompt of this target. The tower itself is transformers' own (see vision.py)."""

    image_token: int  # the id of every token that an image's features stand for
    marker: int  # the id whose text stands for one image in a prompt that a person or a chat template wrote
    # what becomes of the marker's text: (number of features, text of an id) -> text
    expand: Callable[[int, Callable[[int], str]], str]
    # (token ids, the image processor's output) -> rotary positions [3, n], where they are not the index
    positions: Callable[[Sequence[int], Mapping[str, Any]], Tensor] | None = None
    unsplit: bool = False  # some layers look both ways within an image, so it must be run in one pass


class Target(nn.Module):
    """Subclasses build `embed`, `layers`, `norm` and `head`, and say where weights come from."""

    embed: Embedding
    layers: nn.ModuleList
    norm: nn.Module
    head: Head
    ignored: tuple[str, ...] = (r"\.rotary_emb\.inv_freq$",)  # checkpoint tensors that carry nothing

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self._fused = FusedLayers()
        self.stage: Stage | None = None  # where other layers are on other ranks
        self.is_part = False  # whether layers were given up
        self._num_parameters: int | None = None  # with those

    def keep_stage(self, stage: Stage) -> None:
        """Gives up the layers of other stages, and what only the last stage needs."""
        is_tied, self.stage = self.is_tied, stage
        self.keep_layers(stage.begin, stage.end)
        if not stage.is_last:
            self.norm = nn.Identity()
            if not is_tied:
                self.head = AbsentHead(self.head)  # type: ignore[assignment]

    def keep_layers(self, begin: int, end: int) -> None:
        """Gives up the others. weights() still says all, and so does num_parameters."""
        weights, self._num_parameters = self.weights(), self.num_parameters
        self.weights = lambda: weights  # type: ignore[method-assign]
        for number in range(len(self.layers)):
            if not begin <= number < end:
                self.layers[number] = nn.Identity()
        self.is_part = True

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        return cls(config)

    @property
    def hidden_size(self) -> int:
        return self.embed.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.head.vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the target, of all ranks together."""
        if self._num_parameters is not None:
            return self._num_parameters
        return sum(math.prod(whole_shape(parameter)) for parameter in self.parameters())

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_position_axes(self) -> int:
        """1, or 3 where rotary positions are (time, height, width)."""
        return 1

    @property
    def max_len(self) -> int:
        return int(self.config.get("max_position_embeddings") or 2048)

    def forward(
        self, batch: Batch, taps: tuple[int, ...] = (), out: Tensor | None = None, read: ReadRows | None = None
    ) -> Hidden:
        """Runs the rows through all layers. Tap i is the residual stream after i layers; 0 is the embedding. `out`:
        where to put the taps [T, n, H]. `read`: the rows whose last state is wanted, None: all."""
        x = embed_rows(self.embed, batch)
        self.prepare(x, batch)
        if self.stage is not None:
            return self._forward_stage(self.stage, x, batch, taps)
        is_tapped = len(self.layers) in taps
        streams = self._fused(self.layers, x, batch, taps, None if is_tapped else read)
        last = streams[len(self.layers)]
        return self._hidden(take_rows(last, read.rows) if is_tapped and read is not None else last, streams, taps, out)

    def _forward_stage(self, stage: Stage, x: Tensor, batch: Batch, taps: tuple[int, ...]) -> Hidden:
        """The same with the layers that are here: between what the stage before has computed, and the next stage."""
        x, streams = stage.receive(x, taps)
        layers = self.layers[stage.begin : stage.end]
        own = [tap - stage.begin for tap in taps if stage.begin < tap <= stage.end]
        found = self._fused(layers, x, batch, own)
        x = found[len(layers)]
        streams |= {stage.begin + number: found[number] for number in own}
        if stage.is_last:
            return self._hidden(x, streams, taps)
        stage.send(x, streams)
        return self._hidden(x, {}, ())

    def _hidden(
        self, x: Tensor, streams: Mapping[int, Tensor], taps: tuple[int, ...], out: Tensor | None = None
    ) -> Hidden:
        if not taps:
            return Hidden(last=x, taps=x.new_empty(len(x), 0, x.shape[-1]))
        return Hidden(last=x, taps=torch.stack([streams[tap] for tap in taps], dim=1, out=out))

    @property
    def vision(self) -> Vision | None:
        """How it takes images, where it can and the checkpoint has a tower for them."""
        return None

    @property
    def mtp(self) -> Mtp | None:
        """Its multi-token-prediction modules, where the architecture has them and the config says how many."""
        return None

    @property
    def shared_layers(self) -> Mapping[str, SelfAttention]:
        """Where a family lets other layers read the keys and values of its own: by kind, the layer they read."""
        return {}

    def prepare(self, x: Tensor, batch: Batch) -> None:
        """What layers share in a pass may be computed here, from the embeddings [T, H], and put into the memo."""

    def logits(self, last: Tensor, out: Tensor | None = None) -> Tensor:
        """[R, H] before the final norm -> [R, V]; `out`: where to put them."""
        return self.head(self.norm(last), out)

    def own_logits(self, last: Tensor, out: Tensor | None = None) -> Tensor:
        """The same of the ids that this rank has, where ranks share the vocabulary: see Head."""
        return self.head.own_logits(self.norm(last), out)

    def weights(self) -> dict[str, Weight]:
        """Every parameter's name, and the checkpoint tensors it is made of."""
        raise NotImplementedError

    @property
    def is_tied(self) -> bool:
        return self.head.weight is self.embed.weight

    def frame_weights(self, embed: str = "model.embed_tokens", norm: str = "model.norm") -> dict[str, Weight]:
        """The checkpoint tensors of embedding, final norm and head."""
        weights = {"embed.weight": Weight((f"{embed}.weight",)), "norm.weight": Weight((f"{norm}.weight",))}
        return weights if self.is_tied else {**weights, "head.weight": Weight(("lm_head.weight",))}

    def canonical(self, name: str) -> str:
        """The name under which weights() and ignores() know a tensor of the checkpoint: dialects end here."""
        return name

    def ignores(self, name: str) -> bool:
        # A tied checkpoint may still carry its head: the same numbers twice.
        return (self.is_tied and name == "lm_head.weight") or any(re.search(each, name) for each in self.ignored)


def refuse(config: dict[str, Any], key: str, *supported: Any) -> None:
    """Raises if config.json asks for something that is not built: anything set that is not among the supported."""
    value = config.get(key)
    if value is not None and value not in supported:
        known = ", ".join(map(repr, supported)) or "nothing"
        raise ValueError(f"config.json: {key} = {value!r} is not supported for this architecture (supported: {known})")


def nested_text(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's own config: that of a multimodal checkpoint lies in text_config, and a few keys of it may
    stand outside."""
    if "text_config" not in config:
        return config
    outer = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    return {**config["text_config"], **outer}


def of_layers(config: dict[str, Any], key: str, num_layers: int) -> list[Any]:
    """A list that has an entry for every layer at least."""
    (entries,) = require(config, key)
    if len(entries) < num_layers:
        raise ValueError(f"config.json: {key} has {len(entries)} entries for {num_layers} layers (num_hidden_layers)")
    return entries


def require(config: dict[str, Any], *keys: str) -> list[Any]:
    """The values of keys that an architecture cannot do without."""
    missing = [key for key in keys if config.get(key) is None]
    if missing:
        raise ValueError(f"config.json lacks {', '.join(missing)}")
    return [config[key] for key in keys]
