"""The network that learns is the network that serves; documents in a row do not see each other; it learns."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lessons
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import silu

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig
from outrider.drafters import base
from outrider.drafters.dflash import DFlash
from outrider.drafters.fresh import Plan
from outrider.drafters.lesson import Noise, places
from outrider.kernels import dispatch
from outrider.kernels.branches import branch_attention, branch_attention_reference
from outrider.kernels.head_loss import Divergence, HeadMatrix, head_loss, head_loss_reference
from outrider.pair import named_pair
from outrider.training.checkpoint import exported, write_drafter
from outrider.training.dialects import in_speculators_format
from outrider.training.recorded_loss import NUM_SIZES, rounded_up
from outrider.training.run import read_fresh, training_copy
from outrider.training.texts import Text, fill, pack

NUM_STEPS = {"eagle3": 70, "p_eagle": 40, "dflash": 40, "mtp": 40}


@pytest.fixture(scope="module")
def texts(target_path: Callable[..., Path]) -> list[list[int]]:
    return lessons.written(target_path("llama"), 10, 48)


@pytest.fixture(params=list(lessons.FORMS))
def school(
    request: pytest.FixtureRequest, target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> Iterator[lessons.School]:
    made = lessons.open_school(request.param, target_path("llama"), tmp_path, texts)
    with made.llm:
        yield made


def test_the_network_that_serves_is_the_one_that_learns(
    school: lessons.School, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons.check_that_it_learns_as_it_serves(school, monkeypatch)


def test_heads_with_latent_attention(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which nobody begins with, but may go on from (`--init`): they learn what they serve, and are written as they
    were read."""
    head = tiny.save_eagle3(tmp_path, tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB, latent=True), **tiny.LATENT)
    school = lessons.school_of(target_path("llama"), head, texts)
    with school.llm:
        trainer = school.trainer(lessons.rows_apart(texts))
        losses = lessons.learnt(trainer, 12)
        assert losses[-1] < 0.9 * losses[0]
        fresh = read_fresh(head)
        write_drafter(tmp_path / "learnt", fresh.config, exported(school.drafter, trainer.optimizer.average, fresh))
    school = lessons.school_of(target_path("llama"), tmp_path / "learnt", texts)
    with school.llm:
        lessons.check_that_it_learns_as_it_serves(school, monkeypatch)


def test_gated_markov_heads(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are gone on from, too: the gate reads states as they are before the head's multiplier."""
    lessons.open_school("dspark", target_path("llama"), tmp_path / "vanilla", texts).llm.close()
    fresh, noise = read_fresh(tmp_path / "vanilla"), torch.Generator().manual_seed(2)
    rank, size = fresh.config["markov_rank"], fresh.config["hidden_size"]
    gate = {
        "markov_head.gate_proj.weight": torch.randn(rank, size + rank, generator=noise) * 0.2,
        "markov_head.gate_proj.bias": torch.randn(rank, generator=noise),
        "markov_head.markov_w2.weight": torch.randn(len(lessons.IDS), rank, generator=noise) * 0.2,
    }
    config = {**fresh.config, "markov_head_type": "gated", "output_multiplier": 0.7}
    write_drafter(tmp_path / "gated", config, {**fresh.tensors, **gate})
    school = lessons.school_of(target_path("llama"), tmp_path / "gated", texts)
    with school.llm:
        assert isinstance(school.drafter, DFlash)
        assert school.drafter.config.output_multiplier == 0.7
        lessons.check_that_it_learns_as_it_serves(school, monkeypatch)


def test_a_confidence_head_learns_which_drafts_stand(
    target_path: Callable[..., Path], tmp_path: Path, texts: list[list[int]]
) -> None:
    """It learns beside the rest, which learns what it would have learnt without it. What it has learnt leaves out
    drafts that would not have stood."""
    target = target_path("llama")
    school = lessons.open_school("dspark", target, tmp_path / "fresh", texts)
    with school.llm:
        drafter, rows = school.drafter, lessons.rows_apart(texts)
        assert isinstance(drafter, DFlash)
        trainer, network = school.trainer(rows), drafter.network
        lesson, confidence, gradients = trainer.lesson(rows, torch.arange(len(rows))), network.confidence, []
        for network.confidence in (None, confidence):
            drafter.loss(lesson).total.backward()
            gradients.append({name: p.grad for name, p in drafter.named_parameters() if p.grad is not None})
            drafter.zero_grad(set_to_none=True)
        without, beside = gradients
        assert {name.split(".")[1] for name in beside.keys() - without.keys()} == {"confidence"}
        for name, gradient in without.items():
            assert torch.equal(gradient, beside[name]), name
        for number in range(30):
            trainer.step(number / 30)
        fresh = read_fresh(tmp_path / "fresh")
        write_drafter(tmp_path / "learnt", fresh.config, exported(drafter, trainer.optimizer.average, fresh))
    stood = []
    for threshold in (0.0, 0.3):
        settings = SpeculativeConfig.from_dict(
            {"model": str(tmp_path / "learnt"), "num_speculative_tokens": 3, "confidence_threshold": threshold,
             "adaptive": False, "force": True}
        )  # fmt: skip
        params = SamplingParams(max_tokens=43, temperature=1.0, seed=3, ignore_eos=True)
        with LLM(target, settings, device="cpu") as llm:
            outputs = llm.generate([text[:5] for text in texts], params)
        assert [output.prompt_token_ids + output.outputs[0].token_ids for output in outputs] == texts
        found = [output.outputs[0].speculation for output in outputs]
        stood.append((sum(each.accepted for each in found), sum(each.drafted for each in found)))
    (every, drafted), (likely, kept) = stood
    assert kept < 0.9 * drafted
    assert likely / kept > every / drafted + 0.1


@pytest.mark.parametrize("form", ["eagle3", "dflash"])
def test_targets_with_recurrent_layers(
    form: str, target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the target reads of packed texts is what it reads of each alone, and what it serves."""
    target = target_path("nemotron_h")
    texts = lessons.written(target, 3, 40)
    school = lessons.open_school(form, target, tmp_path, texts)
    with school.llm:
        lessons.check_that_it_learns_as_it_serves(school, monkeypatch)
        packed, apart = pack([lessons.text_of(text) for text in texts], 128), lessons.rows_apart(texts)
        together = school.trainer(packed).teacher.read(packed)
        alone = school.trainer(apart).teacher.read(apart)
    for number, document in enumerate(packed.documents[0].unique()[1:].tolist()):
        at = (packed.documents[0] == document).nonzero()[:, 0]
        (row,) = [n for n, text in enumerate(texts) if text == packed.tokens[0][at].tolist()]
        own = alone.last.unflatten(0, apart.tokens.shape)[row, : len(at)]
        torch.testing.assert_close(together.last[at], own, atol=1e-5, rtol=1e-5, msg=f"document {number}")


@pytest.mark.parametrize("method", ["eagle3", "p_eagle", "dflash", "mtp"])
def test_a_wider_copy_begins_as_the_layer_that_it_copies(method: str, target_path: Callable[..., Path]) -> None:
    with LLM(target_path("llama"), None, device="cpu") as llm:
        mlp = llm.target.layers[-1].mlp
        inner = mlp.down.weight.shape[1]
        made = [
            base.drafters[method].fresh(llm.target, Plan(method, mask_token=7, intermediate_size=size))
            for size in (None, inner + 24, inner - 8)
        ]
        x = torch.randn(5, llm.target.hidden_size, generator=torch.Generator().manual_seed(1))
        wanted = mlp(x)
    found = []
    for fresh in made:
        names = [next(name for name in fresh.tensors if f"{part}_proj" in name) for part in ("gate", "up", "down")]
        gate, up, down = (fresh.tensors[name] for name in names)
        assert gate.shape[0] == down.shape[1] == fresh.config["intermediate_size"]
        found.append((silu(x @ gate.T) * (x @ up.T)) @ down.T)
    assert [fresh.config["intermediate_size"] for fresh in made] == [inner, inner + 24, inner - 8]
    torch.testing.assert_close(found[0], wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[1], wanted, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(found[2], wanted, atol=1e-2), "too narrow to be a copy"


def test_documents_of_a_row_do_not_see_each_other(school: lessons.School, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed or each in a row of its own: the same loss, and the same gradient."""
    lessons.everywhere(monkeypatch)
    cut = [text[: 9 + 7 * number] for number, text in enumerate(school.texts[:4])]
    documents = [Text.of(text, [True] * len(text)) for text in cut]  # from the first token on
    apart = school.drafter.loss(school.lesson(fill([[document] for document in documents], 64)))
    packed = pack(documents, 64)
    assert len(packed) == 2
    together = school.drafter.loss(school.lesson(packed))
    torch.testing.assert_close(together.total, apart.total, atol=1e-3, rtol=1e-5)
    assert together.asked.tolist() == apart.asked.tolist() != [0.0] * lessons.DEPTH


def test_places_that_are_not_counted_change_nothing(school: lessons.School) -> None:
    """Where the host must not wait for a count, there is room for as many places as can be learnt, whoever takes it:
    the same loss, the same gradients. Room for fewer than there are is a mistake that does not go unseen."""
    rows = pack([lessons.text_of(text) for text in school.texts[:5]], 64)
    trainer, found = school.trainer(rows), []
    lesson = trainer.lesson(rows, torch.arange(len(rows)))
    for most in (None, rows.num_learnt, rows.tokens.numel()):
        loss = school.drafter.loss(replace(lesson, most_learnt=most))
        gradients = torch.autograd.grad(loss.total, list(trainer.trained().values()), allow_unused=True)
        found.append(
            [loss.total, loss.weight, loss.agreed, loss.asked, *(each for each in gradients if each is not None)]
        )
    for one, *others in zip(*found, strict=True):
        assert one.abs().sum() > 0 or one.shape == found[0][2].shape
        for other in others:
            torch.testing.assert_close(other, one, atol=1e-5, rtol=1e-4)
    with pytest.raises(RuntimeError, match="out of bounds"):
        school.drafter.loss(replace(lesson, most_learnt=1))


@given(st.lists(st.booleans(), min_size=1, max_size=40), st.integers(0, 9))
def test_where_something_is(wanted: list[bool], room: int) -> None:
    mask, most = torch.tensor(wanted), sum(wanted) + room
    found = places(mask, most).tolist()
    assert found[: sum(wanted)] == places(mask, None).tolist() == [n for n, each in enumerate(wanted) if each]
    assert found[sum(wanted) :] == [len(wanted)] * room


@given(st.integers(0, 10**6), st.integers(1, 10**6))
def test_sizes_of_recordings(count: int, total: int) -> None:
    count = min(count, total)
    size = rounded_up(count, total)
    assert count <= size <= total
    assert size - count <= -(-total // NUM_SIZES)


def test_random_numbers_of_a_row_are_its_own() -> None:
    both, one = Noise(torch.tensor([7, 8])).uniform(1000), Noise(torch.tensor([8])).uniform(1000)
    assert torch.equal(both[1:], one)
    assert abs(torch.corrcoef(both)[0, 1]) < 0.1
    assert 0.45 < both.mean() < 0.55
    assert 0 < both.min() < 0.01 < 0.99 < both.max() < 1


@pytest.mark.parametrize("school", list(NUM_STEPS), indirect=True)
def test_it_learns_ten_sequences_by_heart(
    school: lessons.School, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    lessons.everywhere(monkeypatch)
    num_steps = NUM_STEPS[request.node.callspec.params["school"]]
    rows = pack([lessons.text_of(text[:32]) for text in school.texts], 64)
    trainer = school.trainer(rows, divergence=Divergence(0.0, 1.0))
    shares = []
    for number in range(num_steps):
        trainer.step(number / num_steps)
        shares.append(trainer.record.read())
    assert shares[0]["agreement"][0] < 0.3
    assert min(shares[-1]["agreement"]) > 0.9, shares[-1]
    assert shares[-1]["loss"] < 0.2 * shares[0]["loss"]


@pytest.mark.parametrize("form", ["eagle3, few tokens", "p_eagle", "mtp, one module"])
def test_fewer_places_change_none_of_the_others(
    form: str, target_path: Callable[..., Path], tmp_path: Path, texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted far ahead is drafted from few places, those first that something can be learnt from."""
    school = lessons.open_school(form, target_path("llama"), tmp_path, texts)
    with school.llm, torch.no_grad():
        lesson = school.lesson(lessons.rows_apart(texts[:3], 96))
        few = school.drafter.guesses(lesson)  # type: ignore[operator]
        monkeypatch.setattr("outrider.drafters.lesson.KEPT_SHARE", 1.0)
        asked = school.drafter.loss(lesson).asked
        monkeypatch.setattr("outrider.drafters.lesson.KEPT_SHARE", 0.5)
        assert school.drafter.loss(lesson).asked[1] > 0.9 * asked[1]  # what is left out is of little use
        monkeypatch.setattr("outrider.drafters.lesson.KEPT_SHARE", 1.0)
        every = school.drafter.guesses(lesson)  # type: ignore[operator]
    assert [guess.anchors.shape[1] for guess in few] == [96, 67, 47]
    for one, all in zip(few, every, strict=True):
        count = one.anchors.shape[1]
        assert torch.equal(one.anchors, all.anchors[:, :count])
        torch.testing.assert_close(one.hidden, all.hidden[:, :count])


@pytest.mark.parametrize("form", ["eagle3, few tokens", "p_eagle", "dflash", "dspark"])
def test_speculators_format_means_the_same(
    form: str, target_path: Callable[..., Path], tmp_path: Path, texts: Any
) -> None:
    """Read back through the reader of that dialect, the drafter loses as much."""
    target, method = target_path("llama"), lessons.FORMS[form][0]
    school = lessons.open_school(form, target, tmp_path / "original", texts)
    rows = lessons.rows_apart(texts[:2])
    with school.llm:
        wanted = school.drafter.loss(school.lesson(rows)).total
    other = in_speculators_format(read_fresh(tmp_path / "original"), method, str(target), lessons.DEPTH)
    write_drafter(tmp_path / "other", other.config, other.tensors)
    settings = SpeculativeConfig(model=str(tmp_path / "other"), num_speculative_tokens=lessons.DEPTH, force=True)
    with LLM(target, settings, device="cpu") as llm:
        assert type(llm.drafter) is type(school.drafter)
        again = lessons.School(llm, training_copy(llm.target, settings), tmp_path, texts)
        assert torch.equal(again.drafter.loss(again.lesson(rows)).total, wanted)
    named, chosen = named_pair(tmp_path / "other", "auto")  # which says itself what it was made for
    assert chosen is not None
    assert (named, chosen.num_speculative_tokens) == (str(target), lessons.DEPTH)


@pytest.mark.parametrize("kept", [0, 350])  # of 350 slopes
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("divergence", [Divergence(1.0, 0.0), Divergence(0.3, 0.7), Divergence(0.6, 0.4, lk=True)])
def test_the_fused_head_and_loss(
    softcap: float, divergence: Divergence, fused: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch, and in Triton, interpreted."""
    monkeypatch.setattr("outrider.kernels.head_loss.KEPT_ELEMENTS", {"cpu": kept})
    monkeypatch.setattr(dispatch, "is_home", lambda x: fused)
    monkeypatch.setattr("outrider.kernels.head_loss.CHUNK_ELEMENTS", {"cpu": 150})  # three rows at a time
    if fused:
        monkeypatch.setattr("outrider.kernels.gpu.head_loss.BLOCK", 16)  # and a row in several parts
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 8, requires_grad=True), torch.randn(50, 8, requires_grad=True)
    teacher, teacher_head = torch.randn(7, 6), HeadMatrix(torch.randn(50, 6), softcap)
    wanted_loss = torch.rand(7)
    found = []
    for function in (head_loss, head_loss_reference):
        loss = function(hidden, HeadMatrix(weight, softcap), teacher, teacher_head, divergence)
        gradients = torch.autograd.grad((loss.loss * wanted_loss).sum(), (hidden, weight))
        found.append((loss.loss.detach(), loss.surprise, loss.agreed.float(), *gradients))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("branches", "queries", "kv_heads"), [(33, 1, 2), (5, 4, 6)])
def test_attention_of_branches(branches: int, queries: int, kv_heads: int) -> None:
    """The first branch sees nothing of the trunk."""
    torch.manual_seed(0)
    q = torch.randn(2, branches, queries, 6, 8, requires_grad=True)
    trunk = tuple(torch.randn(2, 40, kv_heads, 8, requires_grad=True) for _ in range(2))
    own = tuple(torch.randn(2, branches, 3, kv_heads, 8, requires_grad=True) for _ in range(2))
    seen, wanted, found = torch.rand(2, branches, 40) < 0.4, torch.randn_like(q), []
    seen[:, 0] = False
    for function in (branch_attention, branch_attention_reference):
        out = function(q, trunk, own, seen, 0.4)  # type: ignore[arg-type]
        found.append((out.detach(), *torch.autograd.grad((out * wanted).sum(), (q, *trunk, *own))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
