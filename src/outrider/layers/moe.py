"""Mixtures of experts: routers that choose, experts that compute, and perhaps one that all rows go through."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from outrider.kernels.activation import Activation, sigmoid, silu_mul
from outrider.kernels.dispatch import use_triton
from outrider.kernels.linear import linear
from outrider.kernels.moe import ExpertWeights, best_groups, experts, softmax_top
from outrider.kernels.norm import Normed, materialised
from outrider.kernels.packed import Packed, PackedStack
from outrider.kernels.quantised import Quantised, QuantisedStack, joined
from outrider.layers.linear import Linear, empty_matrix
from outrider.layers.mlp import GatedMLP
from outrider.layers.split import current_ranks, cut, whole, width_share
from outrider.types import Weight


@dataclass(frozen=True)
class ExpertShape:
    num_experts: int
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    bias: bool = False
    activation: Activation = silu_mul


def check_choice(num_chosen: int, num_experts: int) -> None:
    """A ValueError where there are not so many experts to choose."""
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(
            f"config.json: a token cannot go to {num_chosen} of {num_experts} experts (num_experts_per_tok, moe_top_k "
            "or top_k_experts; num_experts, num_local_experts, n_routed_experts or moe_num_experts)"
        )


class Experts(nn.Module):
    """Every rank has a part of every expert's width; their answers are summed."""

    def __init__(self, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        count, hidden = shape.num_experts, shape.hidden_size
        inner = width_share(shape.intermediate_size, "moe_intermediate_size")
        width, self.ranks = inner + inner if shape.gated else inner, current_ranks()
        self.up = empty_matrix(count, width.size, hidden)
        self.down = empty_matrix(count, hidden, inner.size)
        self.packed: dict[nn.Parameter, QuantisedStack | PackedStack] = {}  # instead of a parameter's own numbers
        self.up_bias = nn.Parameter(torch.empty(count, width.size)) if shape.bias else None
        self.down_bias = nn.Parameter(torch.empty(count, hidden)) if shape.bias else None
        self.exact = False
        cut(self.up, 1, width)
        cut(self.down, 2, inner)
        if self.up_bias is not None and self.down_bias is not None:
            cut(self.up_bias, 1, width)
            cut(self.down_bias, 0, whole(count), is_absent=self.ranks is not None and self.ranks.rank > 0)

    def keep(self, parameter: nn.Parameter, form: Quantised | Packed) -> None:
        """Instead of the parameter's own numbers: a form of all matrices, one below the other."""
        if isinstance(form, Quantised):
            self.packed[parameter] = QuantisedStack(form, self.shape.num_experts)
        else:
            count, num_rows, num_columns = parameter.shape
            self.packed[parameter] = PackedStack(form, (count, num_rows, num_columns))

    def forward(self, x: Tensor | Normed, ids: Tensor, shares: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, H], ids and shares [T, k] -> [T, H], added to the residual if there is one."""
        up, down = self.packed.get(self.up, self.up), self.packed.get(self.down, self.down)
        weights = ExpertWeights(up, down, self.up_bias, self.down_bias)
        own = residual if self.ranks is None else None  # answers are summed first
        answer = experts(x, ids, shares, weights, self.shape.activation, residual=own, exact=self.exact)
        if self.ranks is None:
            return answer
        answer = self.ranks.sum(answer)
        return answer if residual is None else residual + answer


def router_logits(gate: Linear, x: Tensor | Normed) -> Tensor:
    """In float32 whatever the model's precision: near ties decide which experts run."""
    if torch.is_grad_enabled():
        with torch.autocast(gate.weight.device.type, enabled=False):
            bias = None if gate.bias is None else gate.bias.float()
            return linear(materialised(x).float(), gate.weight.float(), bias)
    if gate.weight.dtype is torch.float32 or gate.packed is not None:
        return gate(x).float()
    if isinstance(x, Normed):
        out = torch.empty(len(x), len(gate.weight), dtype=torch.float32, device=gate.weight.device)
        return linear(x, gate.weight, exact=gate.exact, out=out)
    if use_triton(x):  # sums are in float32 anyway: they are only not rounded
        from outrider.kernels.gpu import linear as gpu

        out = torch.empty(len(x), len(gate.weight), dtype=torch.float32, device=x.device)
        return gpu.linear(x, gate.weight, exact=gate.exact, out=out)
    return linear(x.float(), gate.weight.float(), exact=gate.exact)


class SoftmaxRouter(nn.Module):
    """Probabilities over all experts; the chosen keep theirs, or share one between them. `wide`: of logits that are not
    rounded to the model's precision."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        num_chosen: int,
        *,
        renormalise: bool,
        bias: bool = False,
        wide: bool = False,
    ) -> None:
        super().__init__()
        check_choice(num_chosen, num_experts)
        self.gate = Linear(hidden_size, num_experts, bias=bias)
        self.num_chosen = num_chosen
        self.renormalise = renormalise
        self.wide = wide
        self.counter: Tensor | None = None  # of programs that have finished, where few rows take one launch

    def forward(self, x: Tensor | Normed) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts of each row [T, k], and their shares [T, k]."""
        gate, count, renormalise = self.gate, self.num_chosen, self.renormalise
        if self.counter is not None and gate.packed is None and not torch.is_grad_enabled():
            from outrider.kernels.gpu import router

            if router.is_for(x, gate.weight):
                return router.route(
                    x, gate.weight, gate.bias, count, self.counter, renormalise=renormalise, wide=self.wide
                )
        return softmax_top(router_logits(gate, x) if self.wide else gate(x), count, renormalise=renormalise)


def route_in_one_launch(model: nn.Module) -> None:
    """Few rows are routed in one launch, in a model that is filled and stays as it is: other bits than with many."""
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, SoftmaxRouter) and use_triton(module.gate.weight):
                module.counter = torch.zeros(1, dtype=torch.int32, device=module.gate.weight.device)


@dataclass(frozen=True)
class SigmoidRouting:
    num_experts: int
    num_chosen: int
    num_groups: int = 1
    num_kept_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        check_choice(self.num_chosen, self.num_experts)
        eligible = self.num_experts // self.num_groups * self.num_kept_groups
        if self.num_experts % self.num_groups or self.num_kept_groups > self.num_groups or self.num_chosen > eligible:
            raise ValueError(
                f"config.json: {self.num_chosen} of {self.num_experts} experts (num_experts_per_tok) cannot be chosen "
                f"from {self.num_kept_groups} of {self.num_groups} groups (topk_group, n_group)"
            )


class SigmoidRouter(nn.Module):
    """Every expert is scored by itself. A learnt bias, in float32, helps to choose but does not weigh."""

    def __init__(self, hidden_size: int, routing: SigmoidRouting) -> None:
        super().__init__()
        self.routing = routing
        self.num_chosen = routing.num_chosen
        self.gate = Linear(hidden_size, routing.num_experts)
        self.bias = nn.Parameter(torch.empty(routing.num_experts, dtype=torch.float32))

    def forward(self, x: Tensor | Normed) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts of each row [T, k], and their shares [T, k]."""
        routing = self.routing
        scores = sigmoid(router_logits(self.gate, x))
        choice = scores + self.bias
        if routing.num_kept_groups < routing.num_groups:
            eligible = best_groups(choice, routing.num_groups, routing.num_kept_groups, 2)
            choice = choice.masked_fill(~eligible, -torch.inf)
        ids = choice.topk(routing.num_chosen, dim=-1).indices
        shares = scores.gather(-1, ids)
        if routing.renormalise:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return ids, shares * routing.scale


class MixtureMLP(nn.Module):
    """The routed experts' answer, plus that of an expert every row goes through."""

    def __init__(self, router: nn.Module, routed: Experts, shared: nn.Module | None = None) -> None:
        super().__init__()
        self.router = router
        self.experts = routed
        self.shared = shared

    def forward(self, x: Tensor | Normed, residual: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H], added to the residual if there is one."""
        if self.experts.packed:  # which do not norm their rows
            x = materialised(x)
        if isinstance(self.shared, GatedMLP):
            residual = self.shared(x, residual)
        elif self.shared is not None:
            residual = self.shared(x) if residual is None else residual + self.shared(x)
        return self.experts(x, *self.router(x), residual)


def share_read(module: nn.Module, num_rows: int) -> dict[nn.Parameter, float]:
    """Which share of the experts' weights a step of so many rows reads, where every expert is as likely as another."""
    shares: dict[nn.Parameter, float] = {}
    for mixture in module.modules():
        routed, router = getattr(mixture, "experts", None), getattr(mixture, "router", None)
        if isinstance(routed, Experts) and router is not None:
            missed = 1 - router.num_chosen / routed.shape.num_experts
            shares |= dict.fromkeys((routed.up, routed.down), 1 - missed**num_rows)
    return shares


def experts_by_number(shape: ExpertShape, source: str, name: str) -> dict[str, Weight]:
    """Checkpoint names where every expert has tensors of its own: `source`0.gate_proj.weight and so on."""
    parts = ("gate_proj", "up_proj") if shape.gated else ("up_proj",)
    numbers = range(shape.num_experts)
    up = tuple(f"{source}{number}.{part}.weight" for number in numbers for part in parts)
    down = tuple(f"{source}{number}.down_proj.weight" for number in numbers)

    def stack_up(tensors: list[Tensor]) -> Tensor:
        rows = torch.stack(tensors)  # [E * parts, I, H]
        return rows.view(shape.num_experts, -1, rows.shape[-1])

    return {f"{name}up": Weight(up, stack_up, joined), f"{name}down": Weight(down, torch.stack, joined)}


def rows_in_order(count: int, parts: list[Quantised], order: Callable[[Tensor], Tensor]) -> Quantised | None:
    """Stacks of as many matrices, each matrix's rows (of all stacks, one below the other) put in the order that `order`
    makes of their numbers."""
    whole = joined(parts)
    if whole is None:
        return None
    number = torch.arange(len(whole.data), device=whole.data.device).view(len(parts), count, -1)
    return whole.rows(order(number.movedim(0, 1).flatten(1)).flatten())
