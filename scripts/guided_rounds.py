"""What requests with a grammar cost the others: milliseconds a round, by how many requests of a batch are guided.

    PYTHONPATH=src python scripts/guided_rounds.py --shape llama-3.1-8b --draft eagle3 --batch 64 --guided 0 1 8 64

Weights are random, and the vocabulary is made up: about one token in a hundred holds a quotation mark, as in real ones.
Drafts of random weights are never accepted: a round brings every request one token, and rounds can be compared."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import torch

from outrider.bench.random_pair import random_engine, shape_of
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine import engine as engines
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.engine.warm_up import warm_up
from outrider.sampling_params import Guided, SamplingParams

STRINGS = 'root ::= item+\nitem ::= "\\"" [^"\\\\\\r\\n]* "\\", "'
SKIPPED = 10  # rounds before the clock starts


class MadeUpTokenizer:
    """Bytes, then words with and without a space, some with punctuation; the last token ends a text."""

    def __init__(self, size: int) -> None:
        chance, letters = random.Random(0), "etaoinshrdlucmfwypvbgkjqxz"
        words = {bytes([code]) for code in range(256)}
        while len(words) < size - 1:
            prefix = chance.choices(("", " ", '"', ' "', "\n", "_", "."), (40, 55, 0.3, 0.3, 1, 1, 1))[0]
            word = prefix + "".join(chance.choices(letters, range(26, 0, -1), k=chance.randint(1, 8)))
            words.add((word + (chance.choice(('"', '":', '",')) if chance.random() < 0.005 else "")).encode())
        self._spelt = [*sorted(words), b""]

    def token_bytes(self, id: int) -> bytes:
        return self._spelt[id]

    def is_silent(self, id: int, *, skip_special_tokens: bool) -> bool:
        return not self._spelt[id]


def measure(engine: Engine, batch: int, num_guided: int, rounds: int, temperature: float) -> dict[str, float]:
    params = SamplingParams(max_tokens=rounds + 64, temperature=temperature, ignore_eos=True)
    requests = []
    for number in range(batch):
        guide = engine.guide(Guided(grammar=STRINGS)) if number < num_guided else None
        prompt = [(7 * number + place) % 1000 for place in range(32)]
        requests.append(Request(f"{num_guided}-{number}", prompt, params, seed=number, guide=guide))
        engine.add(requests[-1])
    times, asked, lengths = [], [], [len(request.tokens) for request in requests]
    guidance_of = engines.guidance_of

    def timed(*given: object) -> object:
        begin = time.perf_counter()
        found = guidance_of(*given)  # type: ignore[arg-type]
        asked.append(time.perf_counter() - begin)
        return found

    engines.guidance_of = timed  # type: ignore[assignment]
    recorded = engine.num_recordings
    while len(times) < rounds + SKIPPED:
        engine.step()
        if all(len(request.tokens) > length for request, length in zip(requests, lengths, strict=True)):
            times.append(time.perf_counter())
            lengths = [len(request.tokens) for request in requests]
    engines.guidance_of = guidance_of
    device_ms = engine.replay_ms(50) if num_guided == 0 and engine.runner.device.type == "cuda" else None
    for request in requests:
        engine.abort(request)
    engine.step()
    gaps = [1e3 * (after - before) for before, after in zip(times[SKIPPED:], times[SKIPPED + 1 :], strict=False)]
    return {
        "guided": num_guided,
        "round_ms": round(statistics.median(gaps), 3),
        "round_ms_p90": round(statistics.quantiles(gaps, n=10)[-1], 3),
        "masks_ms": round(1e3 * statistics.median(asked), 3),
        "masks_ms_p90": round(1e3 * statistics.quantiles(asked, n=10)[-1], 3),
        "recorded_meanwhile": engine.num_recordings - recorded,
        **({} if device_ms is None else {"device_ms": round(device_ms, 3)}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--guided", type=int, nargs="+", default=[0, 1, 8, 64])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=1.0)
    given = parser.parse_args()
    drafter = None if given.draft is None else SpeculativeConfig(method=given.draft, force=True)
    config = EngineConfig(given.shape, drafter, device=given.device, max_model_len=1024, max_num_seqs=given.batch,
                          max_num_batched_tokens=2048, watchdog=None)  # fmt: skip
    engine = random_engine(config, shape_of(given.shape))
    engine.tokenizer = MadeUpTokenizer(engine.target.vocab_size)  # type: ignore[assignment]
    engine.end_ids = frozenset([engine.target.vocab_size - 1])
    begin = time.perf_counter()
    warm_up(engine)
    ready = {"warm_up_seconds": round(time.perf_counter() - begin, 2), "num_recordings": engine.num_recordings}
    print(json.dumps(ready | {name: round(spent, 2) for name, spent in engine.recording_seconds.items()}), flush=True)
    if engine.runner.device.type == "cuda":
        print(json.dumps({"reserved_gib": round(torch.cuda.memory_reserved() / 2**30, 2)}), flush=True)
    for num_guided in given.guided:
        print(json.dumps(measure(engine, given.batch, num_guided, given.rounds, given.temperature)), flush=True)


if __name__ == "__main__":
    main()
