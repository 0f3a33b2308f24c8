"""A weight that is no number would be served as token 0 for ever: it is refused while weights load, by name.
The smallest and the largest number of every parameter are noted where they lie, and looked at once, at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.checkpoints.gguf_file import TENSOR_TYPES
from outrider.kernels.packed import TILE_UNITS, Blocks, Packed, Tiles
from outrider.kernels.quantised import Kind, Quantised, scales
from outrider.types import Checkpoint

# where the half-precision scales of a block lie, in bytes from its beginning
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
FP8_NAN = 0x7F  # beside the sign
EXPONENT = 0x7C00  # of a half-precision number: all ones where it is infinite or no number


class FiniteCheck:
    """Notes weights as they load; `complain` looks at all of them in one copy to the host."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._noted: list[tuple[tuple[str, ...], torch.dtype]] = []
        self._extremes: list[Tensor] = []

    def note(self, parameter: Tensor, names: tuple[str, ...]) -> None:
        """A parameter that is filled, and the tensors that it was made of."""
        if parameter.is_floating_point() and parameter.numel():
            # a NaN anywhere is both the smallest and the largest
            self._noted.append((names, parameter.dtype))
            self._extremes.append(torch.stack(torch.aminmax(parameter.detach())).float())

    def note_kept(self, packed: Packed | Quantised, names: tuple[str, ...]) -> None:
        """A matrix that stays in few bits: it is finite where its scales are, and where eight bits are numbers."""
        if isinstance(packed, Quantised):
            for each in (scales(packed), packed.offset):
                if each is not None:
                    self.note(each, names)
            if packed.kind is Kind.FP8:
                strange = ((packed.data.view(torch.uint8) & FP8_NAN) == FP8_NAN).any()
                self._noted.append((names, packed.scale.dtype))
                self._extremes.append(torch.where(strange, torch.nan, 0.0).expand(2))
            return
        parts: tuple[Blocks | Tiles, ...] = packed.parts
        bad = [name for name, part in zip(names, parts, strict=True) if not scales_are_finite(part)]
        if bad:
            raise self._refusal(bad[0], "holds scales that are infinite or no numbers")

    def complain(self) -> None:
        """A ValueError that names the first tensor with a number that is not finite."""
        if not self._extremes:
            return
        finite = torch.stack(self._extremes).isfinite().all(1).tolist()
        for (names, dtype), fine in zip(self._noted, finite, strict=True):
            if not fine:
                raise self._found(names, dtype)

    def _found(self, names: Sequence[str], dtype: torch.dtype) -> ValueError:
        for name in names:
            stored = self._checkpoint.tensor(name)
            if not bool(stored.float().isfinite().all()):
                return self._refusal(name, f"holds {_kind(stored)}")
        return ValueError(
            f"{self._checkpoint.path}: {', '.join(names[:4])} holds numbers beyond what {dtype} can: choose another "
            "dtype (bfloat16 or float32)"
        )

    def _refusal(self, name: str, what: str) -> ValueError:
        return ValueError(
            f"{self._checkpoint.path}: tensor {name} {what}, and nothing sensible would come out: download the file "
            "again, or take the checkpoint before training went wrong"
        )


def check_kind(checkpoint: Checkpoint, name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Whole, boolean and complex numbers are no weights: to cast them would hide what is wrong."""
    if parameter.is_floating_point() and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{checkpoint.path}: tensor {name} holds {kind}, where floating-point weights belong: if it is quantised, "
            "config.json must say how (quantization_config); otherwise save it as float32, bfloat16 or float16"
        )


def scales_are_finite(rows: Blocks | Tiles) -> bool:
    """Whether all scales of quantised rows are finite numbers."""
    if isinstance(rows, Tiles):
        _, unit_bytes, place = TILE_UNITS[rows.type_number]
        return not _any_not_finite(rows.data.view(-1, unit_bytes)[:, place].reshape(-1, 2))
    name, _, block_bytes = TENSOR_TYPES[rows.type_number]
    blocks = rows.data.view(-1, block_bytes)
    return not any(_any_not_finite(blocks[:, place : place + 2]) for place in SCALES[name])


def _any_not_finite(halves: Tensor) -> bool:
    """Whether some half-precision number, given as two bytes with the high one last, is infinite or no number."""
    return bool((halves[:, 1] & (EXPONENT >> 8)).eq_(EXPONENT >> 8).any())


def _kind(tensor: Tensor) -> str:
    return "NaN" if bool(tensor.float().isnan().any()) else "an infinite number"
