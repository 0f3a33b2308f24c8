"""What prefix reuse costs and saves where layers are recurrent: NemotronH with random weights, plain.
Decoding with and without snapshots, then prompts that come again and a conversation. One JSON line last."""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from typing import Any

import torch

from outrider.bench.random_pair import random_engine
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.engine.warm_up import warm_up
from outrider.sampling_params import SamplingParams

SHARED = {
    "architectures": ["NemotronHForCausalLM"],
    "mamba_head_dim": 64,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "mlp_hidden_act": "relu2",
}
SHAPES: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": SHARED | {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_hidden_layers": 52,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "mamba_num_heads": 128, "ssm_state_size": 128, "n_groups": 8,
    },
    "small": SHARED | {
        "hybrid_override_pattern": "M-M*-M-",
        "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 7,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64,
        "mamba_num_heads": 16, "ssm_state_size": 64, "n_groups": 2,
    },
}  # fmt: skip


class Bench:
    def __init__(self, options: argparse.Namespace, *, reuse: bool) -> None:
        self.shape = SHAPES[options.shape]
        speculative = None
        if options.draft:
            speculative = SpeculativeConfig(method=options.draft, num_speculative_tokens=options.k, adaptive=False,
                                            synthetic_acceptance_length=2.5)  # fmt: skip
        config = EngineConfig(self.shape, speculative, device=options.device, max_model_len=8192,  # type: ignore[arg-type]
                              max_num_seqs=options.batch, enable_prefix_caching=reuse)  # fmt: skip
        self.engine: Engine = random_engine(config, self.shape)
        warm_up(self.engine)

    def run(self, prompts: list[list[int]], max_tokens: int) -> tuple[list[Request], float, float]:
        """The requests, the time to the last one's first token, and milliseconds a round after that."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        requests = [Request(f"{time.time_ns()}-{n}", prompt, params, seed=0) for n, prompt in enumerate(prompts)]
        begin = time.perf_counter()
        for request in requests:
            self.engine.add(request)
        while not all(request.num_outputs for request in requests):
            self.engine.step()
        first, rounds = time.perf_counter(), 0
        while self.engine.has_work:
            self.engine.step()
            rounds += 1
        return requests, (first - begin) * 1e3, (time.perf_counter() - first) * 1e3 / max(rounds, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="nemotron-h-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--draft", default=None, help="eagle3, dflash or ngram")
    parser.add_argument("-k", type=int, default=3)
    parser.add_argument("--num-tokens", type=int, default=600)
    options = parser.parse_args()
    chance = random.Random(0)
    found: dict[str, Any] = {"shape": options.shape, "batch": options.batch, "draft": options.draft}

    def text(length: int) -> list[int]:
        return [chance.randrange(3, SHAPES[options.shape]["vocab_size"]) for _ in range(length)]

    # the cost: the same decoding, by turns, without snapshots and with one every 256 tokens
    bench: Bench | None = None
    for reuse in (False, True, False, True):
        if bench is not None:  # there is no room for two
            bench.engine.close()
            bench = None
            gc.collect()
            torch.cuda.empty_cache()
        bench = Bench(options, reuse=reuse)
        for size in (1, options.batch):
            prompts = [text(40) for _ in range(size)]
            bench.run(prompts, 40)
            _, _, ms = bench.run(prompts, options.num_tokens)
            device = bench.engine.replay_ms(50)
            found.setdefault(f"round, batch {size}, {'with' if reuse else 'without'}", []).append(
                {"ms": round(ms, 3), "device ms": device and round(device, 3)}
            )
    # what it saves: each prompt twice, then the next turn of a conversation
    assert bench is not None
    snapshots = bench.engine.scheduler.snapshots
    assert snapshots is not None
    found["snapshots"] = snapshots.pool.num_places - 1
    bench.run([text(3000)], 4)
    for length in (1072, 2000, 2144, 3000, 3500):
        prompt = text(length)
        (_,), cold, _ = bench.run([prompt], 20)
        (again,), hit, _ = bench.run([prompt], 20)
        found[f"prompt {length}"] = {"cold ms": round(cold, 2), "hit ms": round(hit, 2), "cached": again.num_cached}
    (request,), _, _ = bench.run([text(2000)], 500)
    (turn,), ms, _ = bench.run([[*request.tokens, *text(60)]], 20)
    found["next turn"] = {"tokens": len(turn.prompt), "cached": turn.num_cached, "ms": round(ms, 2)}
    for name, value in found.items():
        print(f"{name:32} {value}")
    print(json.dumps(found))


if __name__ == "__main__":
    with torch.inference_mode():
        main()
