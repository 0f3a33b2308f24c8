"""Checkpoints whose weights are stored in few bits, shown as dense ones: the numbers are restored as they are read.
Which tensors make up a weight, and how, is up to the formats in quantised_formats.py."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.checkpoints.quantised_formats import FORMATS, Format
from outrider.checkpoints.quantised_weight import FLOAT8_TYPES, Settings, Stored
from outrider.kernels.quantised import Quantised
from outrider.types import Checkpoint

ATTENTION_SCALES = (".q_scale", ".k_scale", ".v_scale")  # for keys and values in 8 bits


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint itself, or, where its config says that it is quantised, a dense view of it."""
    try:
        return checkpoint if _find_settings(checkpoint) is None else QuantisedCheckpoint(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


class QuantisedCheckpoint:
    """A dense view of a quantised checkpoint. Which weights are quantised is read off the tensors: the lists of modules
    in a config (`ignore`, `modules_to_not_convert`) do not always call them what the files call them."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner
        self.path, self.config, self.generation_config = inner.path, inner.config, inner.generation_config
        settings = _find_settings(inner)
        if settings is None:
            raise ValueError(f"{self.path}: config.json has no quantization_config; open it as a plain checkpoint")
        method = settings.get("quant_method", str, "missing")
        if method not in FORMATS:
            raise settings.unsupported("quant_method", method, ", ".join(FORMATS))
        self._format: Format = FORMATS[method](settings)
        self._weights: dict[str, Stored] = {}
        for name in inner.names():
            if not name.endswith(ATTENTION_SCALES):
                self._add(name)
        for stored in self._weights.values():
            self._check(stored)
        for name in [name for name in self._weights if self._is_made_up(name)]:
            del self._weights[name]

    def names(self) -> list[str]:
        return list(self._weights)

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._find(name)
        return stored.shape("values") if "values" in stored.parts else self._format.shape(stored)

    def tensor(self, name: str) -> Tensor:
        """Quantised weights in float32, others as stored."""
        stored = self._find(name)
        if "scale" in stored.parts:
            return self._format.dense(stored)
        tensor = stored.tensor("values")
        if tensor.dtype in FLOAT8_TYPES or tensor.dtype == torch.int8:
            raise stored.broken("values", f"is {tensor.dtype}, but no scale comes with it")
        return tensor

    def quantised(self, name: str, device: torch.device) -> Quantised | None:
        """A matrix, or a stack one below the other, as kernels compute with it, on this device; None where it is not
        quantised, or has no such form."""
        stored = self._find(name)
        if "scale" not in stored.parts or len(self.shape(name)) not in (2, 3):
            return None
        return self._format.quantised(replace(stored, device=device))

    def bytes_per_number(self, names: Sequence[str]) -> float:
        """What a CPU takes for each number of these weights, as a rule: those in odd orders or groups take four."""
        narrow = all("scale" in self._find(name).parts for name in names)
        return self._format.bytes_per_number if narrow else 4.0

    def parts_of(self, name: str) -> list[str]:
        """The tensors as stored that make up a weight."""
        return list(self._find(name).parts.values())

    def page_scale(self, name: str) -> float | None:
        """What a 1 in pages of 8 bits stands for, by a tensor of this name; None where there is none."""
        if name not in self._inner.names():
            return None
        scale = self._inner.tensor(name).float()
        if scale.numel() != 1 or not 0 < scale.item() < float("inf"):
            found = f"{scale.item():g}" if scale.numel() == 1 else f"{scale.numel()} numbers"
            raise ValueError(
                f"{self.path}: {name} must be one number above 0, for all heads of a layer, not {found}: leave "
                "kv_cache_dtype out, so that it is not needed"
            )
        return float(scale.item())

    def close(self) -> None:
        self._inner.close()

    def _add(self, name: str) -> None:
        """Puts a stored tensor where it belongs: a part of some weight, or all of it."""
        dense, role = name, "values"
        for suffix, (dense_suffix, part) in self._format.suffixes.items():
            if name.endswith(suffix):
                dense, role = name.removesuffix(suffix) + dense_suffix, part
                break
        stored = self._weights.setdefault(dense, Stored(self._inner, dense, {}))
        other = stored.parts.setdefault(role, name)
        if other != name:
            raise ValueError(f"{self.path} has {other} and {name}, which are the {role} of one weight; remove one")

    def _check(self, stored: Stored) -> None:
        """Whatever belongs to a weight must come with it, and with packed numbers all that unpacks them."""
        names = list(stored.parts.values())
        if "values" in stored.parts and "packed" in stored.parts:
            raise ValueError(f"{self.path} has {' and '.join(names)}, which are one weight twice; remove one of them")
        if "values" not in stored.parts and "packed" not in stored.parts:
            raise ValueError(f"{self.path} has {names[0]}, but not the weight it belongs to; download the model again")
        for suffix, (dense_suffix, part) in self._format.suffixes.items():
            if "packed" in stored.parts and part in self._format.needed and part not in stored.parts:
                raise stored.broken("packed", f"comes without {stored.name.removesuffix(dense_suffix)}{suffix}")

    def _is_made_up(self, name: str) -> bool:
        """Is this a bias of zeros beside a packed weight? One that was trained would not be zero."""
        weight = self._weights.get(name.removesuffix(".bias") + ".weight")
        if not (self._format.made_up_biases and name.endswith(".bias") and weight and "packed" in weight.parts):
            return False
        return not self._find(name).tensor("values").any()

    def _find(self, name: str) -> Stored:
        if name not in self._weights:
            raise ValueError(f"{self.path} has no tensor {name!r}; check that the checkpoint is the one you mean")
        return self._weights[name]


def _find_settings(checkpoint: Checkpoint) -> Settings | None:
    text_config = checkpoint.config.get("text_config")
    for config in (checkpoint.config, text_config if isinstance(text_config, dict) else {}):
        values = config.get("quantization_config")
        if isinstance(values, dict):
            return Settings(values, f"{checkpoint.path}: quantization_config")
        if values is not None:
            raise ValueError(f"{checkpoint.path}: quantization_config is {values!r}, no object; repair config.json")
    return None
