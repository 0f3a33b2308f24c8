"""Images in prompts, against transformers: the same tower, merged embeddings, positions, masks and tokens."""

import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import Oracle, drafter_settings, suits

from outrider import LLM, SamplingParams
from outrider.drafters.eagle3 import Eagle3Network
from outrider.llm import total_speculation
from outrider.models.qwen2_5_vl import grid_positions
from outrider.types import Batch

pytest.importorskip("PIL", reason="images need the vision extra")
from PIL import Image

IMAGE = 250
SPECIAL = ("<img>", "<boi>", "<eoi>", "<begin>", "<end>")  # from IMAGE on
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 160, "page_size": 4}
FAMILIES = ["gemma3_vision", "gemma4_vision", "gemma4_vision_causal", "qwen2_5_vl", "qwen3_vl"]
# one of every way in which drafters look at what came before
METHODS = ["draft_model", "eagle3", "p_eagle", "dflash", "gemma4_assistant", "oracle"]


def sample_of(family: str) -> str:
    return "gemma4_vision" if family.startswith("gemma4") else family


PAIRS = [(family, method) for family in FAMILIES for method in METHODS if suits(method, sample_of(family))]
CHAT = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}{{ marker }}{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)


def processor(family: str) -> Any:
    import transformers

    if family.startswith("gemma3"):
        return transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    if family.startswith("gemma4"):
        return transformers.Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70, pooling_kernel_size=2)
    patch = 16 if family == "qwen3_vl" else 14
    return transformers.Qwen2VLImageProcessorPil(patch_size=patch, min_pixels=patch**2 * 16, max_pixels=patch**2 * 64)


def save_tokenizer(directory: Path, marker: str) -> None:
    """Byte-level, with the ids of images at the end."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[:IMAGE]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    assert tokenizer.token_to_id("<img>") == IMAGE
    tokenizer.save(str(directory / "tokenizer.json"))
    template = CHAT.replace("{{ marker }}", marker)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def marker_of(family: str) -> str:
    return "<boi>" if family.startswith("gemma3") else "<img>"


@pytest.fixture(scope="session")
def vision_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp(family)
            reference(family).save_pretrained(path)
            processor(family).save_pretrained(path)
            save_tokenizer(path, marker_of(family))
            made[family] = path
        return made[family]

    return make


def reference(family: str) -> Any:
    if family == "gemma4_vision_causal":
        return tiny.reference("gemma4_vision", use_bidirectional_attention=None)
    if family == "gemma4_vision":
        return tiny.reference("gemma4_vision", use_bidirectional_attention="vision")
    return tiny.reference(family)


def picture(seed: int, width: int = 56, height: int = 42) -> Image.Image:
    noise = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(noise.to(torch.uint8).numpy())


def prompts_of(family: str) -> list[dict[str, Any]]:
    """Two images, one image after a long text, none."""
    marker = marker_of(family)
    first = {"prompt": f"hello {marker} and {marker} tell", "image": [picture(1), picture(2, 40, 64)]}
    second = {"prompt": f"a text that is longer than the window {marker}", "image": picture(3)}
    asked = [{"prompt": each["prompt"], "multi_modal_data": {"image": each["image"]}} for each in (first, second)]
    return [*asked, {"prompt": "no image at all in here"}]


@torch.no_grad()
def expected_logits(family: str, ids: list[int], images: list[Image.Image]) -> torch.Tensor:
    """transformers, in one pass over everything [n, V]."""
    model = reference(family)
    input_ids = torch.tensor([ids])
    if not images:
        return model(input_ids=input_ids).logits[0]
    inputs = {
        name: value
        for name, value in processor(family)(images=images, return_tensors="pt").items()
        if name in ("pixel_values", "image_grid_thw", "image_position_ids")
    }
    kinds = (input_ids == IMAGE).long()
    name = "token_type_ids" if family.startswith("gemma3") else "mm_token_type_ids"
    return model(input_ids=input_ids, **{name: kinds}, **inputs).logits[0]


def images_of(prompt: dict[str, Any]) -> list[Image.Image]:
    given = prompt.get("multi_modal_data", {}).get("image", [])
    return given if isinstance(given, list) else [given]


@pytest.mark.parametrize("budget", [2048, 7])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family: str, budget: int, vision_path: Callable[[str], Path], kernels: str) -> None:
    """Log-probabilities of prompts and answers, whole and in chunks (an image stays whole where it must)."""
    prompts = prompts_of(family)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    options = {**SMALL, "max_num_batched_tokens": budget, "max_num_seqs": 2}
    with LLM(vision_path(family), None, **options) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        images = images_of(prompt)
        assert ids.count(IMAGE) >= 4 * len(images)
        expected = expected_logits(family, ids, images).log_softmax(-1)
        found = (output.prompt_logprobs or [])[1:] + (output.outputs[0].logprobs or [])
        wanted = [float(expected[index, token]) for index, token in enumerate(ids[1:])]
        got = [row[token].logprob for row, token in zip(found, ids[1:], strict=True)]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), atol=1e-4, rtol=0)
        after = len(output.prompt_token_ids) - 1
        assert output.outputs[0].token_ids == expected[after:-1].argmax(-1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_plain_is_speculative_with_images(
    family: str,
    method: str,
    params: SamplingParams,
    vision_path: Callable[[str], Path],
    target_path: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path, prompts = vision_path(family), prompts_of(family)
    with LLM(path, None, **SMALL) as llm:
        plain = llm.generate(prompts, params)
    expected = [output.outputs[0].token_ids for output in plain]
    Oracle.truth = [output.prompt_token_ids + tokens for output, tokens in zip(plain, expected, strict=True)]
    settings = {**drafter_settings(method, tmp_path, target_path, sample_of(family)), "force": True}
    with LLM(path, settings, **SMALL, max_num_batched_tokens=9, max_num_seqs=2) as llm:
        outputs = llm.generate(prompts, params)
        again = llm.generate(prompts, params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert [output.outputs[0].token_ids for output in again] == expected, "with pages of the first run"
    assert sum(output.num_cached_tokens for output in again) > 0
    if method == "oracle":
        total = total_speculation(outputs)
        assert 0 < total.accepted < total.drafted


def test_another_image_is_another_prefix(vision_path: Callable[[str], Path]) -> None:
    """Placeholders are the same tokens for every image: pages must be told apart by what the image shows."""
    text = "hello <img> and <img> tell"

    def ask(llm: LLM, *seeds: int) -> Any:
        prompt = {"prompt": text, "multi_modal_data": {"image": [picture(seed) for seed in seeds]}}
        return llm.generate([prompt], GREEDY)[0]

    with LLM(vision_path("qwen2_5_vl"), None, **SMALL) as llm:
        first, second, third = ask(llm, 1, 2), ask(llm, 1, 3), ask(llm, 4, 2)
        repeated = ask(llm, 1, 2)
    with LLM(vision_path("qwen2_5_vl"), None, **SMALL) as llm:
        assert ask(llm, 1, 3).outputs[0].token_ids == second.outputs[0].token_ids
    assert first.num_cached_tokens == 0
    assert 0 < third.num_cached_tokens < 8 < second.num_cached_tokens < repeated.num_cached_tokens
    assert repeated.outputs[0].token_ids == first.outputs[0].token_ids != third.outputs[0].token_ids


def test_positions_count_rows_and_columns() -> None:
    ids = [7, 8, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, IMAGE, 9, 9]
    positions = grid_positions(ids, torch.tensor([[1, 4, 6]]), IMAGE, 2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3_vision"])
def test_chat_with_an_image(family: str, vision_path: Callable[[str], Path]) -> None:
    """A part of a message is an image: given as it is, as a file's bytes or as a data: URL, it is the same."""
    image = picture(5)
    file = io.BytesIO()
    image.save(file, format="PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "image", "image": image},
        {"type": "image", "image": file.getvalue()},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    with LLM(vision_path(family), None, **SMALL) as llm:
        answers = [
            llm.chat([{"role": "user", "content": [{"type": "text", "text": "see "}, part]}], GREEDY)[0]
            for part in parts
        ]
    assert answers[0].prompt_token_ids.count(IMAGE) > 1
    assert len({tuple(answer.outputs[0].token_ids) for answer in answers}) == 1


def test_errors_say_what_to_do(vision_path: Callable[[str], Path], target_path: Callable[..., Path]) -> None:
    image = picture(1)

    def ask(llm: LLM, prompt: Any, images: Any) -> None:
        llm.generate([{"prompt": prompt, "multi_modal_data": {"image": images}}], GREEDY)

    with LLM(vision_path("qwen2_5_vl"), None, **SMALL) as llm:
        with pytest.raises(ValueError, match="has 0 places for an image, but 1 images were given: write '<img>'"):
            ask(llm, "no place", image)
        with pytest.raises(ValueError, match="not fetched"):
            ask(llm, "<img>", "https://example.org/cat.png")
        with pytest.raises(ValueError, match="there is no image"):
            ask(llm, "<img>", "no-such-file.png")
        with pytest.raises(ValueError, match="cannot be read"):
            ask(llm, "<img>", b"not an image")
        with pytest.raises(ValueError, match="knows image only, not audio"):
            llm.generate([{"prompt": "x", "multi_modal_data": {"audio": b""}}], GREEDY)
    with LLM(target_path("llama"), None, **SMALL) as llm, pytest.raises(ValueError, match="takes no images"):
        llm.generate([{"prompt_token_ids": [5, 6], "multi_modal_data": {"image": image}}], GREEDY)


def test_without_the_extra(vision_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with LLM(vision_path("qwen2_5_vl"), None, **SMALL) as llm, pytest.raises(ValueError, match=r"\.\[vision\]"):
        llm.generate([{"prompt": "<img>", "multi_modal_data": {"image": b""}}], GREEDY)


def test_a_tower_tensor_that_is_missing_is_named(vision_path: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "broken"
    shutil.copytree(vision_path("qwen2_5_vl"), path)
    tensors = load_file(path / "model.safetensors")
    (name,) = [each for each in tensors if each.endswith("visual.blocks.1.attn.qkv.weight")]
    del tensors[name]
    save_file(tensors, path / "model.safetensors")
    with LLM(path, None, **SMALL) as llm, pytest.raises(ValueError, match=r"lacks tensor visual\.blocks\.1\.attn\.qkv"):
        llm.generate([{"prompt": "<img>", "multi_modal_data": {"image": picture(1)}}], GREEDY)


def test_a_tower_weight_that_is_no_number_is_named(vision_path: Callable[[str], Path], tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    path = tmp_path / "broken"
    shutil.copytree(vision_path("qwen2_5_vl"), path)
    tensors = load_file(path / "model.safetensors")
    (name,) = [each for each in tensors if each.endswith("visual.blocks.1.attn.qkv.weight")]
    tensors[name][0, 0] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with LLM(path, None, **SMALL) as llm, pytest.raises(ValueError, match=r"visual\.blocks\.1\.attn\.qkv.* holds NaN"):
        llm.generate([{"prompt": "<img>", "multi_modal_data": {"image": picture(1)}}], GREEDY)


def test_a_feature_drafter_gets_the_positions_of_the_states_it_reads(
    vision_path: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of an EAGLE-3 head stand one token after the hidden state they read, whose three positions they have, and
    whose image features are embedded: across chunks, after prefix hits, and while drafting."""
    seen: list[tuple[int, list[int], bool]] = []

    def spied(run: Callable[..., Any]) -> Callable[..., Any]:
        def spy(self: Eagle3Network, embedding: Any, state: Any, batch: Batch, *rows: Any) -> Any:
            shown = embedding - self_embed(batch.input_ids)
            for row, index in enumerate(batch.indices.tolist()):
                if int(batch.write_locations[row]) >= SMALL["page_size"]:  # not written to the dump
                    seen.append((index, batch.positions[:, row].tolist(), bool(shown[row].any())))
            return run(self, embedding, state, batch, *rows)

        return spy

    for name in ("forward", "follow"):
        monkeypatch.setattr(Eagle3Network, name, spied(getattr(Eagle3Network, name)))
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    settings = {"method": "eagle3", "model": str(tiny.save_eagle3(tmp_path / "eagle3", **rope)), "force": True}
    prompt = prompts_of("qwen2_5_vl")[0]
    with LLM(vision_path("qwen2_5_vl"), settings, **SMALL, max_num_batched_tokens=9, max_num_seqs=1) as llm:
        self_embed = llm.target.embed
        ids = llm.generate([prompt], GREEDY)[0].prompt_token_ids
        inputs = processor("qwen2_5_vl")(images=images_of(prompt), return_tensors="pt")
        known = grid_positions(ids, inputs["image_grid_thw"], IMAGE, 2)
        assert llm.generate([prompt], GREEDY)[0].num_cached_tokens > 0
    after = int(known.max()) + 1 - len(ids)
    positions = [*known.T.tolist(), *([index + after] * 3 for index in range(len(ids), 160))]
    assert len(seen) > len(ids)
    assert all(place == positions[index - 1] for index, place, _ in seen)
    # the one row beyond a chunk is made up for at the beginning of the next
    assert {index for index, _, has_features in seen if has_features} == {i for i, t in enumerate(ids) if t == IMAGE}
    assert any(place[0] != place[2] for _, place, _ in seen)
