"""The choice of a token: a deterministic function of logits, options, seed and position.
Sampling is an exponential race whose noise is keyed by (seed, position, token id), so a replay gives the same token."""

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native, native_sampling
from outrider.kernels.collective import Ranks
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.filters import without_dropped
from outrider.types import Sampling

GREEDY_TEMPERATURE = 1e-5  # at or under it, a request is greedy
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


@dataclass(frozen=True)
class Columns:
    """Which ids of a vocabulary the logits of a rank are about: `count` of them, from `begin` on. What reaches beyond
    the vocabulary is padding, and -inf."""

    ranks: Ranks
    begin: int
    count: int
    vocab_size: int

    def ids(self, device: torch.device) -> Tensor:
        return torch.arange(self.begin, self.begin + self.count, device=device)

    def place(self, ids: Tensor) -> Tensor:
        """The columns of ids; -1 for those of other ranks."""
        inside = (ids >= self.begin) & (ids < min(self.begin + self.count, self.vocab_size))
        return torch.where(inside, ids - self.begin, -1)

    def own(self, table: Tensor) -> Tensor:
        """table [R, V] -> [R, columns], 0 where that is padding."""
        found = table[:, self.begin : self.begin + self.count]
        return torch.nn.functional.pad(found, (0, self.count - found.shape[1]))

    def gathered(self, logits: Tensor) -> Tensor:
        """The columns of all ranks side by side: [R, columns] -> [R, V]."""
        return self.ranks.gather(logits).transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def highest(self, values: Tensor) -> Tensor:
        """The highest value that any rank has for each row: [R] -> [R]."""
        return self.ranks.gather(values).amax(0)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 (shifts are made logical by masking the sign's copies away)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def uniform(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Random numbers from 0 to 1 [R, V] for rows with `seed` [R] and `positions` [R] and token ids `ids` [V] or
    [R, V]: the same on every device."""
    key = _mix(_mix(seed + _GOLDEN) + positions * _GOLDEN)  # [R]
    bits = _mix(key[:, None] + (ids + 1) * _GOLDEN)  # [R, V]
    # 32 random bits, centred in their cell: never 0 or 1
    return (((bits >> 32) & 0xFFFFFFFF).to(torch.float32) + 0.5) * 2.0**-32


def gumbel(seed: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise [R, V] for rows with `seed` [R] and `positions` [R] and token ids `ids` [V] or [R, V]."""
    # small values keep their precision in float32, and small exponentials are the ones that win the race
    return -torch.log(-torch.log1p(-uniform(seed, positions, ids).clamp(max=1 - 2.0**-24)))


def filter_logits(logits: Tensor, sampling: Sampling, rows: Tensor) -> Tensor:
    """top_k, then top_p, then min_p on scaled logits [R, V]; what falls out becomes -inf. The best token stays."""
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= sampling.top_k[rows, None], -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs  # mass of the better tokens
    share = sampling.top_p[rows, None]
    drop = ((before >= share) & (share < 1)) | (probs < sampling.min_p[rows, None] * probs[:, :1])
    drop[:, 0] = False
    return torch.full_like(logits, -torch.inf).scatter_(-1, order, ordered.masked_fill(drop, -torch.inf))


def argmax(logits: Tensor) -> Tensor:
    """The best column of each row; the first of equals."""
    return native.row_argmax(logits) if use_native(logits) else logits.argmax(-1)


def choose_split(logits: Tensor, sampling: Sampling, rows: Tensor, positions: Tensor, columns: Columns) -> Tensor:
    """The same where every rank has some of the columns, [R, columns]: all have the same noise, so that the best of
    everybody's best is the token. Where some request filters, logits are gathered first."""
    if sampling.filtered and not sampling.greedy:
        return choose(columns.gathered(logits).contiguous(), sampling, rows, positions)
    best = logits.argmax(-1, keepdim=True)
    values = logits.gather(1, best).float()
    if not sampling.greedy:
        temperature = sampling.temperature[rows][:, None]
        scaled = logits.float() / temperature.clamp(min=GREEDY_TEMPERATURE)
        noisy = scaled + gumbel(sampling.seed[rows], positions, columns.ids(logits.device))
        drawn = noisy.argmax(-1, keepdim=True)
        is_greedy = temperature <= GREEDY_TEMPERATURE
        best = torch.where(is_greedy, best, drawn)
        values = torch.where(is_greedy, values, noisy.gather(1, drawn))
    return columns.ranks.best(values[:, 0], best[:, 0] + columns.begin)


def choose(
    logits: Tensor,
    sampling: Sampling,
    rows: Tensor,
    positions: Tensor,
    ids: Tensor | None = None,
    out: Tensor | None = None,
    sharpness: float = 1.0,
) -> Tensor:
    """The token of each row [R]: `rows` is its slot in `sampling`, `positions` where the token will stand.

    `ids` [V] gives the target's id of each column where the columns are a reduced vocabulary; the result is in
    target ids. Drafters call this too: with the same noise their choice coincides with the target's most often; what
    is left after the filters can be made sharper for them. `out` [R]: where to put the tokens, dense.
    """
    if sampling.extra and not sampling.greedy:
        logits = without_dropped(logits, sampling, rows, GREEDY_TEMPERATURE)
    if use_triton(logits):
        return _choose_triton(logits, sampling, rows, positions, ids, out, sharpness)
    if use_native(logits) and not sampling.greedy:
        found = native_sampling.draw(logits, drawing_of(sampling, rows, positions, ids, sharpness))
        return found if out is None else out.copy_(found)
    best = argmax(logits)
    if not sampling.greedy:
        temperature = sampling.temperature[rows]
        scaled = logits.float() / temperature.clamp(min=GREEDY_TEMPERATURE)[:, None]
        if sampling.filtered:
            scaled = filter_logits(scaled, sampling, rows)
        columns = torch.arange(logits.shape[-1], device=logits.device) if ids is None else ids
        drawn = argmax(scaled * sharpness + gumbel(sampling.seed[rows], positions, columns))
        best = torch.where(temperature <= GREEDY_TEMPERATURE, best, drawn)
    best = best if ids is None else ids[best]
    return best if out is None else out.copy_(best)


def drawing_of(
    sampling: Sampling, rows: Tensor, positions: Tensor, ids: Tensor | None, sharpness: float
) -> native_sampling.Drawing:
    """How native kernels draw tokens."""
    least = GREEDY_TEMPERATURE
    return native_sampling.Drawing(sampling, rows, positions, ids, least=least, sharpness=sharpness)


def _choose_triton(
    logits: Tensor,
    sampling: Sampling,
    rows: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    out: Tensor | None,
    sharpness: float,
) -> Tensor:
    from outrider.kernels.gpu import filter as gpu_filter
    from outrider.kernels.gpu import sampling as gpu

    rows, positions = rows.contiguous(), positions.contiguous()  # kernels count on it
    cut = None
    if sampling.filtered and not sampling.greedy:
        filters = sampling.top_k, sampling.top_p, sampling.min_p
        cut = gpu_filter.cuts(logits, sampling.temperature, filters, rows, least=GREEDY_TEMPERATURE)
    return gpu.choose(
        logits,
        sampling.temperature,
        sampling.seed,
        rows,
        positions,
        ids,
        greedy=sampling.greedy,
        least=GREEDY_TEMPERATURE,
        cut=cut,
        out=out,
        sharpness=sharpness,
    )
