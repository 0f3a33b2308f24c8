"""llama.cpp as a peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from outrider.bench.peers import Clock, Peer, PeerOptions, PeerUnavailable, import_peer, peers
from outrider.bench.sides import Prompts, Timing


@peers.register("llama-cpp-python", "llama.cpp")
class LlamaCpp(Peer):
    """llama.cpp on the quantised file itself. Its Python binding knows no batches: prompts come one after the other."""

    name = "llama-cpp-python"

    def __init__(self, model: Any, file_bytes: int) -> None:
        self.model = model
        self.pass_bytes = file_bytes

    @classmethod
    def open(cls, options: PeerOptions) -> Self:
        path = Path(options.model).expanduser()
        if path.suffix != ".gguf":
            raise PeerUnavailable(f"it reads .gguf files only, and {path} is none")
        library = import_peer("llama_cpp", "llama-cpp-python")
        threads = options.threads
        on_device = -1 if options.device.type == "cuda" else 0
        model = library.Llama(
            str(path), n_ctx=options.max_len, n_threads=threads, n_gpu_layers=on_device, verbose=False
        )
        return cls(model, path.stat().st_size)

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        clock = Clock()
        firsts, tokens = [], []
        for prompt in prompts:
            self.model.reset()
            answer: list[int] = []
            for token in self.model.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
                if not answer:
                    firsts.append(clock.now())
                answer.append(int(token))
                if len(answer) == max_tokens:
                    break
            tokens.append(answer)
        return Timing(clock.now(), sum(firsts) / len(firsts), max_tokens * len(prompts), tokens)

    def close(self) -> None:
        self.model.close()
