"""Outrider and llama.cpp on the same GGUF file and processors, by turns: tokens/s of whole answers (a short prompt,
then greedy tokens), their ratio in each turn, seconds to load, and resident memory over the size of the file. Where
others use the machine too, compare with one thread and by processor time: threads that wait for each other lose more.
--prompt N reads that many tokens of this project's documentation instead, and times them and the answer's apart.

    python scripts/compare_llama_cpp.py MODEL.gguf --batch 1 --batch 8 --other-python /path/to/venv/bin/python

llama.cpp comes from llama-cpp-python (built with cmake, for this processor), in an environment of its own or in this.
Each side is a process of its own, which waits while the other works. --draft NAME_OR_FILE adds Outrider with drafts."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TEXTS = {
    "story": "Write a short story about a fox who lives by a river, and about all whom it meets on its way to the sea.",
    "repetition": "The fox went down to the river and saw a fish. The fish said hello to the fox. " * 3,
    "code": 'def quick_sort(items):\n    """Sort a list of numbers, without changing it, and return a new one."""\n',
}
UNITS = ("seconds", "processor_s")
DOCUMENTS = ("docs/tour.md", "docs/compatibility.md", "docs/serve.md", "docs/training.md")
MAX_LEN = 1024


def main() -> None:
    options = read_options()
    if options.side:
        serve(options)
        return
    sides = {"outrider": [sys.executable], "llama.cpp": [options.other_python]}
    for draft in options.draft:
        sides[f"outrider + {Path(draft).name}"] = [sys.executable, draft]
    processes = {name: start(name, command, options) for name, command in sides.items()}
    file_bytes = Path(options.model).stat().st_size
    for name, process in processes.items():
        ready = read(process)
        print(f"{name}: loaded in {ready['load_s']:.1f} s")
    for text in options.text:
        for batch in options.batch:
            show(f"{text}, batch {batch}", race(processes, TEXTS[text], batch, options))
    for length in options.prompt:
        read_prompt, answered = race_prompt(processes, length, options)
        show(f"prompt of {length} tokens", read_prompt)
        show(f"{options.tokens} tokens after it", answered)
    for name, process in processes.items():
        resident = ask(process, {})["resident"]
        print(f"{name}: {resident / 1e6:.0f} MB resident, {resident / file_bytes:.2f} of the file")
        process.kill()


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--batch", type=int, action="append", help="answers at once; may be given several times")
    parser.add_argument("--text", choices=TEXTS, action="append", help="what is gone on with; several times, too")
    parser.add_argument("--prompt", type=int, action="append", default=[], help="tokens to read; several times, too")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--draft", action="append", default=[], help="a method such as ngram, or a .gguf file")
    parser.add_argument("--other-python", default=sys.executable, help="the interpreter that has llama-cpp-python")
    parser.add_argument("--cpu-activations", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--with-draft", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.batch, options.text = options.batch or [1], options.text or ([] if options.prompt else ["story"])
    options.max_len = max([MAX_LEN, *(length + options.tokens + 64 for length in options.prompt)])
    return options


# ---- the race ----


def start(name: str, command: list[str], options: argparse.Namespace) -> subprocess.Popen[str]:
    python, *draft = command
    given = [python, __file__, options.model, "--side", name, "--threads", str(options.threads)]
    given += ["--cpu-activations", options.cpu_activations, "--kv-cache-dtype", options.kv_cache_dtype]
    given += ["--batch", str(max(options.batch))]
    given += [word for length in options.prompt for word in ("--prompt", str(length))]
    given += ["--tokens", str(options.tokens)]
    given += ["--with-draft", draft[0]] if draft else []
    return subprocess.Popen(given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a side ended: see above")
    return json.loads(line)


def ask(process: subprocess.Popen[str], question: dict[str, Any]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    return read(process)


def race(
    processes: dict[str, subprocess.Popen[str]], text: str, batch: int, options: argparse.Namespace
) -> dict[str, list[list[float]]]:
    """Tokens/s of every side in every turn, and tokens per second of processors; the first turn warms up."""
    found: dict[str, list[list[float]]] = {name: [] for name in processes}
    for turn in range(options.turns + 1):
        for name, process in processes.items():
            took = ask(process, {"text": text, "batch": batch, "tokens": options.tokens})
            if turn:
                found[name].append([batch * options.tokens / took[each] for each in UNITS])
    return found


def race_prompt(
    processes: dict[str, subprocess.Popen[str]], length: int, options: argparse.Namespace
) -> tuple[dict[str, list[list[float]]], dict[str, list[list[float]]]]:
    """The same of a prompt's tokens, up to the answer's first, and of those that follow."""
    folder = Path(__file__).parent.parent
    text = "\n".join((folder / name).read_text() for name in DOCUMENTS)
    reading: dict[str, list[list[float]]] = {name: [] for name in processes}
    answering: dict[str, list[list[float]]] = {name: [] for name in processes}
    for turn in range(options.turns + 1):
        for name, process in processes.items():
            question = {"text": text, "length": length, "batch": 1}
            first, whole = (ask(process, question | {"tokens": 1 + more}) for more in (0, options.tokens))
            if turn:
                reading[name].append([length / first[each] for each in UNITS])
                answering[name].append([options.tokens / (whole[each] - first[each]) for each in UNITS])
    return reading, answering


def show(title: str, found: dict[str, list[list[float]]]) -> None:
    print(f"{title}:")
    for name, turns in found.items():
        line = f"  {name:44}"
        for number, unit in enumerate(("tok/s", "tok/processor s")):
            speeds, others = ([turn[number] for turn in each] for each in (turns, found["llama.cpp"]))
            ratios = [own / other for own, other in zip(speeds, others, strict=True)]
            line += f"{statistics.median(speeds):7.1f} {unit}, x {statistics.median(ratios):.2f}"
            line += f" ({min(ratios):.2f} ... {max(ratios):.2f})   "
        print(line, flush=True)


# ---- one side ----


def serve(options: argparse.Namespace) -> None:
    began = time.perf_counter()
    side = LlamaCpp(options) if options.side == "llama.cpp" else Outrider(options)
    print(json.dumps({"load_s": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        if not question:
            print(json.dumps({"resident": resident_bytes()}), flush=True)
            continue
        began, busy = time.perf_counter(), time.process_time()
        side.answer(question["text"], question.get("length"), question["batch"], question["tokens"])
        took = {"seconds": time.perf_counter() - began, "processor_s": time.process_time() - busy}
        print(json.dumps(took), flush=True)


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


class Outrider:
    def __init__(self, options: argparse.Namespace) -> None:
        from outrider import LLM

        drafts: dict[str, Any] | None = None
        if options.with_draft is not None:
            is_file = options.with_draft.endswith(".gguf")
            drafts = (
                {"method": "draft_model", "model": options.with_draft} if is_file else {"method": options.with_draft}
            )
        self.llm = LLM(
            options.model,
            drafts,
            max_model_len=options.max_len,
            max_num_seqs=max(options.batch),
            threads=options.threads,
            cpu_activations=options.cpu_activations,
            kv_cache_dtype=options.kv_cache_dtype,
            enable_prefix_caching=False,
        )

    def answer(self, text: str, length: int | None, batch: int, num_tokens: int) -> None:
        from outrider import SamplingParams, TokensPrompt

        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        prompt = self.llm.get_tokenizer().encode(text)[:length]
        self.llm.generate([TokensPrompt(prompt_token_ids=prompt)] * batch, params)


class LlamaCpp:
    """Through its C interface, as its Python classes know no batches."""

    def __init__(self, options: argparse.Namespace) -> None:
        import llama_cpp

        self.api = llama_cpp
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, None)
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(options.model.encode(), settings)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        chosen = llama_cpp.llama_context_default_params()
        chosen.n_ctx, chosen.n_seq_max = options.max_len * max(options.batch), max(options.batch)
        chosen.n_batch = chosen.n_ctx
        chosen.n_threads = chosen.n_threads_batch = options.threads
        chosen.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, chosen)
        self.size = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self.room = llama_cpp.llama_batch_init(chosen.n_ctx, 0, 1)

    def answer(self, text: str, length: int | None, batch: int, num_tokens: int) -> None:
        import numpy

        api = self.api
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        prompt = self._tokens(text)[:length]
        rows = [(token, place, sequence) for sequence in range(batch) for place, token in enumerate(prompt)]
        ends = [(sequence + 1) * len(prompt) - 1 for sequence in range(batch)]
        for place in range(len(prompt), len(prompt) + num_tokens):
            self._decode(rows, set(ends))
            logits = [api.llama_get_logits_ith(self.context, end) for end in ends]
            chosen = [int(numpy.ctypeslib.as_array(each, (self.size,)).argmax()) for each in logits]
            rows = [(token, place, sequence) for sequence, token in enumerate(chosen)]
            ends = list(range(batch))

    def _tokens(self, text: str) -> list[int]:
        raw = text.encode()
        room = (self.api.llama_token * (len(raw) + 2))()
        count = self.api.llama_tokenize(self.vocabulary, raw, len(raw), room, len(room), True, True)
        return list(room[:count])

    def _decode(self, rows: list[tuple[int, int, int]], wanted: set[int]) -> None:
        self.room.n_tokens = len(rows)
        for number, (token, place, sequence) in enumerate(rows):
            self.room.token[number], self.room.pos[number] = token, place
            self.room.n_seq_id[number], self.room.seq_id[number][0] = 1, sequence
            self.room.logits[number] = number in wanted
        assert self.api.llama_decode(self.context, self.room) == 0


if __name__ == "__main__":
    main()
