"""A mixture's experts: every row goes through the few experts chosen for it, and their answers are added up.
A row's result depends on that row alone: experts see its bits as they are, and the sum has a fixed order."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native_experts
from outrider.kernels.activation import Activation, gelu_tanh_mul, silu_mul
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.linear import linear
from outrider.kernels.norm import Normed, materialised
from outrider.kernels.packed import Packed, PackedStack
from outrider.kernels.quantised import QuantisedStack

Stack = Tensor | PackedStack | QuantisedStack


@dataclass(frozen=True)
class ExpertWeights:
    up: Stack  # [E, I or 2 I, H]; gate and up one below the other where there is a gate
    down: Stack  # [E, H, I]
    up_bias: Tensor | None = None  # [E, I or 2 I]
    down_bias: Tensor | None = None  # [E, H]

    def widened(self, dtype: torch.dtype) -> "ExpertWeights":
        """What has few bits on a GPU, as the numbers that it stands for."""
        up, down = (each.dense(dtype) if isinstance(each, QuantisedStack) else each for each in (self.up, self.down))
        return ExpertWeights(up, down, self.up_bias, self.down_bias)

    def fit(self, dtype: torch.dtype) -> bool:
        """Whether kernels can compute with them in this type."""
        return all(not isinstance(each, Tensor) or each.dtype == dtype for each in (self.up, self.down))


def experts_reference(x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Expert after expert, each over the rows that chose it."""
    weights = weights.widened(x.dtype)
    order = ids.flatten().argsort(stable=True)  # of all answers [T k], those of one expert side by side
    counts = ids.flatten().bincount(minlength=weights.up.shape[0]).tolist()
    parts = []
    for expert, rows in enumerate(x[order // ids.shape[1]].split(counts)):
        if len(rows):
            up_bias = None if weights.up_bias is None else weights.up_bias[expert]
            down_bias = None if weights.down_bias is None else weights.down_bias[expert]
            inner = activation(linear(rows, *_matrix(weights.up, expert, up_bias)))
            parts.append(linear(inner, *_matrix(weights.down, expert, down_bias)))
    answers = torch.cat(parts)[order.argsort()].unflatten(0, ids.shape)  # [T, k, H]
    shares = shares.to(x.dtype)
    total = answers[:, 0] * shares[:, :1]
    for place in range(1, ids.shape[1]):
        total = total + answers[:, place] * shares[:, place, None]
    return total


def _matrix(stack: Stack, expert: int, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Packed | None]:
    """An expert's weight and bias, as linear() takes them."""
    assert not isinstance(stack, QuantisedStack), "widened before"
    if isinstance(stack, Tensor):
        return stack[expert], bias, None
    nothing = torch.full((1,), torch.nan).expand(stack.shape[1:])
    return nothing, bias, stack[expert]


def experts(
    x: Tensor | Normed,
    ids: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    *,
    residual: Tensor | None = None,
    exact: bool = False,
) -> Tensor:
    """x [T, H], the experts chosen for each row [T, k] and their shares [T, k] -> [T, H], plus the residual [T, H].
    `exact`: on a GPU too, a row's bits do not depend on how many others there are."""
    rows = x.x if isinstance(x, Normed) else x
    if use_triton(rows) and weights.fit(rows.dtype):
        from outrider.kernels.gpu import few_experts, moe

        if not exact and few_experts.is_for(*ids.shape):
            return few_experts.experts(x, ids, shares, weights, activation, residual)
        answer = moe.experts(materialised(x), ids, shares, weights, activation, exact=exact)
    elif isinstance(x, Tensor) and use_native(x) and activation in (silu_mul, gelu_tanh_mul):
        wide = weights.widened(x.dtype)
        assert not isinstance(wide.up, QuantisedStack)
        assert not isinstance(wide.down, QuantisedStack)
        matrices, biases = (wide.up, wide.down), (weights.up_bias, weights.down_bias)
        answer = native_experts.experts(x, ids, shares, matrices, biases, gelu=activation is gelu_tanh_mul)
    else:
        answer = experts_reference(materialised(x), ids, shares, weights, activation)
    return answer if residual is None else residual + answer


def softmax_top(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """The most likely experts [T, k] and their probabilities among all of them, or among the chosen."""
    if use_triton(logits):
        from outrider.kernels.gpu import router

        return router.softmax_top(logits, count, renormalise=renormalise)
    return softmax_top_reference(logits, count, renormalise=renormalise)


def softmax_top_reference(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    shares, ids = logits.float().softmax(-1).topk(count, dim=-1)
    return ids, shares / shares.sum(-1, keepdim=True) if renormalise else shares


def best_groups(scores: Tensor, num_groups: int, num_kept: int, members: int) -> Tensor:
    """Which experts belong to the best groups [T, E]; a group is worth the sum of its `members` best experts."""
    groups = scores.unflatten(-1, (num_groups, -1))
    worth = groups.topk(members, dim=-1).values.sum(-1)  # [T, groups]
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(num_kept, dim=-1).indices, True)
    return kept[..., None].expand_as(groups).flatten(-2)
