"""Images in prompts: transformers' own image processor and vision tower, with the weights of the target's checkpoint.
Needs the `vision` extra; nothing else does."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.chat_template import MAX_IMAGES
from outrider.checkpoints.finite import FiniteCheck, check_kind
from outrider.extras import extra_missing
from outrider.models.base import Target, Vision
from outrider.tokenizer import Tokenizer
from outrider.types import Checkpoint, Images

if TYPE_CHECKING:
    from PIL.Image import Image

Picture = Any  # a PIL image, a path, the bytes of a file, or a data: URL
MAX_PIXELS = 64 * 2**20  # of all images of a prompt: decoded they take four bytes each, whatever their files take
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # others are rare, and so are the eyes on their decoders


@dataclass(frozen=True)
class Encoded:
    """What the tower makes of some images."""

    features: list[Tensor]  # of each image [N, L, H]
    digests: list[bytes]
    inputs: Mapping[str, Any]  # the image processor's output


class VisionTower:
    def __init__(self, checkpoint: Checkpoint, target: Target) -> None:
        transformers = _import_transformers()
        if not (checkpoint.path / "config.json").is_file():
            raise ValueError(
                f"images need a checkpoint directory with config.json and a vision tower: {checkpoint.path}"
            )
        self._processor = _image_processor(transformers, checkpoint.path)
        self._model = _build(transformers, checkpoint.path)
        self.vision = vision_of(target)
        weight = next(target.parameters())
        self._model.to(device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            _fill(self._model, checkpoint)

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Picture]) -> Encoded:
        inputs = self._processor(images=open_pictures(pictures), return_tensors="pt")
        weight = next(self._model.parameters())
        tensors = {
            name: value.to(weight.device, weight.dtype if value.is_floating_point() else None)
            for name, value in inputs.items()
            if name in ("pixel_values", "image_grid_thw", "image_position_ids")
        }
        output = self._model.get_image_features(**tensors, return_dict=True)  # type: ignore[operator]
        levels = [output.pooler_output, *(output.get("deepstack_features") or [])]
        features = [torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)]
        digests = [hashlib.sha256(each.float().cpu().numpy().tobytes()).digest() for each in features]
        return Encoded(features, digests, inputs)


def prompt_with_images(
    prompt: str | Sequence[int],
    pictures: Sequence[Picture],
    tower: VisionTower,
    tokenizer: Tokenizer,
    *,
    add_special_tokens: bool = True,
) -> tuple[list[int], Images]:
    """Token ids with a place for every feature, and what stands there. Token ids must have those places already."""
    vision = tower.vision
    encoded = tower.encode(pictures)
    counts = [len(each) for each in encoded.features]
    if isinstance(prompt, str):
        ids = tokenizer.encode(_expanded(prompt, counts, vision, tokenizer), add_special_tokens=add_special_tokens)
    else:
        ids = list(prompt)
    places = [index for index, token in enumerate(ids) if token == vision.image_token]
    if len(places) != sum(counts):
        raise ValueError(
            f"the prompt has {len(places)} tokens for images ({vision.image_token}), but its {len(pictures)} images "
            f"have {sum(counts)} features"
        )
    spans, names, done = [], [], 0
    for count, digest in zip(counts, encoded.digests, strict=True):
        spans.append((places[done], places[done + count - 1] + 1))
        names += [_name(digest, number) for number in range(count)]
        done += count
    device = encoded.features[0].device
    positions = vision.positions(ids, encoded.inputs) if vision.positions is not None else None
    return ids, Images(
        indices=torch.tensor(places, device=device),
        features=torch.cat(encoded.features),
        spans=tuple(spans),
        names=tuple(names),
        positions=positions,
    )


def vision_of(target: Target) -> Vision:
    if target.vision is None:
        raise ValueError(f"{type(target).__name__} takes no images here: use a checkpoint with a vision tower")
    return target.vision


def open_pictures(pictures: Sequence[Picture]) -> list[Image]:
    """Reads images. Nothing is fetched: a URL must be a data: URL, which holds the image itself. Nothing is decoded
    before it is known from their headers that all of them together are not too large."""
    if len(pictures) > MAX_IMAGES:
        raise ValueError(f"{len(pictures)} images in one prompt; at most {MAX_IMAGES} are taken")
    opened = [_opened(picture) for picture in pictures]
    num_pixels = sum(image.width * image.height for image in opened)
    if num_pixels > MAX_PIXELS:
        sizes = ", ".join(f"{image.width} x {image.height}" for image in opened[:4])
        raise ValueError(
            f"the images of a prompt ({sizes}{', ...' * (len(opened) > 4)}) have {num_pixels} pixels; "
            f"{MAX_PIXELS} are taken at most: make them smaller"
        )
    try:
        return [image.convert("RGB") for image in opened]
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error


def _opened(picture: Picture) -> Image:
    """An image of which the header has been read."""
    try:
        from PIL import Image
    except ImportError as error:
        raise extra_missing("an image", "vision", error) from error
    if isinstance(picture, Image.Image):
        return picture
    source: Any = picture
    if isinstance(picture, str) and picture.startswith("data:"):
        source = io.BytesIO(_data_of(picture))
    elif isinstance(picture, str) and "://" in picture:
        raise ValueError(f"an image is not fetched from {picture[:40]!r}: give a file, its bytes or a data: URL")
    elif isinstance(picture, bytes):
        source = io.BytesIO(picture)
    elif isinstance(picture, str | Path):
        if not Path(picture).is_file():
            raise ValueError(f"there is no image {picture}")
    else:
        raise ValueError(f"an image must be a PIL image, a path, bytes or a data: URL, not {type(picture).__name__}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own bound is lower
            return Image.open(source, formats=FORMATS)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"an image cannot be read: {error}") from error


def _data_of(url: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("it is not base64")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"a data: URL of an image cannot be read: {error}") from error


def _expanded(prompt: str, counts: Sequence[int], vision: Vision, tokenizer: Tokenizer) -> str:
    marker = tokenizer.token(vision.marker)
    pieces = prompt.split(marker)
    if len(pieces) - 1 != len(counts):
        raise ValueError(
            f"the prompt has {len(pieces) - 1} places for an image, but {len(counts)} images were given: write "
            f"{marker!r} where each belongs"
        )
    text = pieces[0]
    for count, piece in zip(counts, pieces[1:], strict=True):
        text += vision.expand(count, tokenizer.token) + piece
    return text


def _name(digest: bytes, number: int) -> int:
    """A number for one token of an image; below zero, so never a token id."""
    hashed = hashlib.sha256(digest + number.to_bytes(4, "little")).digest()
    return -1 - int.from_bytes(hashed[:7], "little")


def _import_transformers() -> ModuleType:
    try:
        import PIL  # noqa: F401
        import transformers
    except ImportError as error:
        raise extra_missing("an image", "vision", error) from error
    return transformers


def _image_processor(transformers: ModuleType, path: Path) -> Any:
    try:
        return transformers.AutoImageProcessor.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ValueError(
            f"{path} does not say how images are prepared: preprocessor_config.json or processor_config.json is missing"
        ) from error


def _build(transformers: ModuleType, path: Path) -> nn.Module:
    """The multimodal model with a real vision part and a language part that takes no memory."""
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        with torch.device("meta"):
            model = transformers.AutoModelForImageTextToText.from_config(config).model
    except Exception as error:  # whatever its many config classes make of what they do not expect
        raise ValueError(
            f"{path}: transformers cannot build the vision tower that config.json describes ({error!r}); "
            "repair vision_config, or download the file again"
        ) from error
    for name, part in list(model.named_children()):
        if name == "language_model":
            setattr(model, name, None)
        elif isinstance(part, transformers.PreTrainedModel):  # built anew: some of its buffers are computed, not stored
            setattr(model, name, type(part)._from_config(part.config))
        else:
            part.to_empty(device="cpu")
    return model.eval()


def _fill(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Every stored tensor of the tower, strictly. Names on disk differ in a prefix, older ones in a wrapper too."""
    stored = {name.removeprefix("model.").replace(".vision_model.", "."): name for name in checkpoint.names()}
    check = FiniteCheck(checkpoint)
    for name, tensor in model.state_dict().items():
        if name not in stored:
            raise ValueError(f"{checkpoint.path} lacks tensor {name} of its vision tower: the download is incomplete")
        found = checkpoint.tensor(stored[name])
        if found.shape != tensor.shape:
            raise ValueError(
                f"{checkpoint.path}: {stored[name]} has shape {tuple(found.shape)}, but config.json asks for "
                f"{tuple(tensor.shape)}"
            )
        check_kind(checkpoint, stored[name], found, tensor)
        tensor.copy_(found)
        check.note(tensor, (stored[name],))
    check.complain()
