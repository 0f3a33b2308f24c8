"""LLM: the engine behind the names that vLLM users know."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.agreement import Checkup, check_up
from outrider.chat_template import ChatOptions, Messages
from outrider.checkpoints.loader import Progress
from outrider.compatibility.llm import CALLS, METHODS
from outrider.config import EngineConfig, WatchdogConfig, batch_limits
from outrider.drafters.base import Drafter
from outrider.engine.request import Request
from outrider.engine.shared import SharedEngine
from outrider.engine.warm_up import warm_up
from outrider.host_memory import give_back_freed
from outrider.llm_arguments import EngineArgs, Named, dtype_name, length_of, settle, template_text
from outrider.metrics import Figures, Metric
from outrider.models.base import Target
from outrider.offline import Defaults, UseTqdm, as_list, of_kind, output_of, params_for, shown_progress, tokenized
from outrider.outputs import RequestOutput
from outrider.outputs import total_speculation as total_speculation  # found here by many
from outrider.pair import AUTO, Speculative, named_pair, open_pair
from outrider.prompts import Prompt, Prompts
from outrider.request_maker import RequestMaker, seed_of
from outrider.sampling_params import SamplingParams
from outrider.startup import CHECKING, StartupTimes
from outrider.tokenizer import Tokenizer
from outrider.types import Images
from outrider.worker import follow_if_launched


class LLM:
    """A target, perhaps with a drafter, ready to generate. Use as a context manager, or call close().

    Several threads may generate, chat and stream at once: their requests are decoded together."""

    def __init__(
        self,
        model: str | Path | None = None,
        speculative_config: Speculative = AUTO,
        *,
        tokenizer: str | Path | None = None,
        skip_tokenizer_init: bool = False,
        chat_template: str | Path | None = None,
        generation_config: str | Path = AUTO,
        override_generation_config: Mapping[str, Any] | None = None,
        seed: int | None = None,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        max_model_len: int | str | None = None,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        page_size: int = 16,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool | None = True,
        num_snapshots: int | None = None,
        snapshot_interval: int = 256,
        num_predicted_tokens: int = 16,
        watchdog: WatchdogConfig | bool | None = True,
        enforce_eager: bool = False,
        quantization: str | None = None,
        cpu_activations: str = "auto",
        kv_cache_dtype: str = "auto",
        exact: bool = False,
        threads: int | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        progress: Progress | None = None,
        **others: Any,
    ) -> None:
        """Whatever else vLLM's LLM takes works too, or has no effect, or is refused with a reason:
        docs/compatibility.md says which."""
        named, settings = settle(Named(model, tokenizer, speculative_config), others, LLM)
        target, speculative = named_pair(named.model, named.speculative)
        self._chat_template = template_text(chat_template)
        self._defaults = Defaults(generation_config, override_generation_config or {})
        limits = batch_limits(device)
        chosen = EngineConfig(
            model=target,
            speculative=speculative,
            tokenizer=named.tokenizer,
            skip_tokenizer_init=skip_tokenizer_init,
            dtype=dtype_name(dtype),
            device=device,
            max_model_len=length_of(max_model_len),
            max_num_seqs=limits.max_num_seqs if max_num_seqs is None else max_num_seqs,
            max_num_batched_tokens=(
                limits.max_num_batched_tokens if max_num_batched_tokens is None else max_num_batched_tokens
            ),
            page_size=page_size,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching is not False,
            num_snapshots=num_snapshots,
            snapshot_interval=snapshot_interval,
            num_predicted_tokens=num_predicted_tokens,
            watchdog=(WatchdogConfig() if watchdog else None) if isinstance(watchdog, bool) else watchdog,
            enforce_eager=enforce_eager,
            quantization=quantization,
            cpu_activations=cpu_activations,
            kv_cache_dtype=kv_cache_dtype,
            exact=exact,
            threads=threads,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
        )
        self.config = replace(chosen, **settings)
        follow_if_launched(self.config)
        self.startup = StartupTimes()
        self.engine, self.budget = open_pair(self.config, progress, self.startup)
        self.tokenizer = self.engine.tokenizer
        self.prompts = Prompts(self.tokenizer, self.target.vocab_size, self.max_model_len, str(self.config.model))
        self._shared = SharedEngine(self.engine, self.config.torch_device)
        self._seeds = random.Random(seed) if seed is not None else random.SystemRandom()
        self._maker = RequestMaker(self.engine, self.config, self.prompts, self._seeds)
        self._figures = Figures(str(target))
        with self.startup.timed("check-up"):
            self.checkup = self._check_up(progress)
        give_back_freed()

    @classmethod
    def from_config(cls, config: EngineConfig, progress: Progress | None = None) -> LLM:
        """From a configuration that names everything, as commands have it."""
        settings = {name: value for name, value in vars(config).items() if name not in ("model", "speculative")}
        return cls(config.model, config.speculative, **settings, progress=progress)

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> LLM:
        return cls(**vars(arguments))

    if not TYPE_CHECKING:  # a type checker that saw it would believe in any name

        def __getattr__(self, name: str) -> Any:
            """Called by Python for what there is not; some of it, users of vLLM look for."""
            reason = f" ({METHODS[name]})" if name in METHODS else ""
            raise AttributeError(f"LLM has no attribute {name!r}{reason}")

    # the drafter

    def _check_up(self, progress: Progress | None) -> Checkup | None:
        """Refuses a drafter that agrees with nothing the target says: it would only take time."""
        settings = self.config.speculative
        if settings is None or settings.force or settings.is_synthetic:
            return None
        checkup = check_up(self.engine, partial(progress, CHECKING) if progress is not None else None)
        if checkup.is_dead:
            self.close()
            drafter = settings.model or settings.method
            raise ValueError(
                f"the drafter {drafter} does not agree with the target {self.config.model} ({checkup.note}), so it "
                f'would only take time: "outrider doctor {self.config.model} {drafter}" says why; --force, or '
                '"force": true in speculative_config, uses it all the same'
            )
        return checkup

    # life

    def warm_up(self) -> None:
        """On a GPU: compiles kernels and records rounds now, so that the first requests do not wait for it."""
        with self._shared.between_steps(), self.startup.timed("warm-up"):
            warm_up(self.engine)

    def close(self) -> None:
        """Frees the cache and the weights. The object cannot be used afterwards."""
        if self._open:
            self._shared.close(self.engine.close)
            del self.engine, self._maker

    @property
    def _open(self) -> bool:
        return "engine" in self.__dict__

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # what it is

    @property
    def target(self) -> Target:
        return self.engine.target

    @property
    def drafter(self) -> Drafter | None:
        return self.engine.drafter

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer_for("get_tokenizer()")

    def get_metrics(self) -> list[Metric]:
        """Figures of the requests that have ended, and of the cache, in vLLM's names."""
        return self._shared.read(lambda: self._figures.metrics(self.engine))

    def reset_prefix_cache(self) -> bool:
        """What earlier prompts have left in the cache is not found again."""
        pool = self.engine.scheduler.pool
        with self._shared.between_steps():
            pool.forget(range(1, pool.num_pages))
        return True

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without params get: what the model's authors advise, in generation_config.json."""
        return self._default_params.clone()

    @cached_property
    def _default_params(self) -> SamplingParams:
        return self._defaults.params(self.config.model)

    # generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        on_step: Callable[[int, int], None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """One output per prompt, in order. `on_step(finished, total)` is called as it goes on. Without params, the
        model's own defaults hold."""
        listed = tokenized(as_list(prompts), CALLS.settle(others, "generate()"))
        params = params_for(len(listed), sampling_params or self.get_default_sampling_params())
        pairs = enumerate(zip(listed, params, strict=True))
        groups = [self.requests_for(prompt, each, number) for number, (prompt, each) in pairs]
        with shown_progress(use_tqdm, on_step) as on_step:
            self._run([request for group in groups for request in group], on_step)
        return [output_of(prompt, group) for prompt, group in zip(listed, groups, strict=True)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: UseTqdm = False,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """The answer to a conversation, or to each of several. See ChatOptions for the options."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        options = ChatOptions(
            tools,
            chat_template or self._chat_template,
            add_generation_prompt,
            continue_final_message,
            chat_template_kwargs or {},
        )
        conversations = list(messages) if several else [messages]
        prompts: list[Prompt] = [self.chat_prompt(each, options) for each in conversations]  # type: ignore[arg-type]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, **others)

    def chat_prompt(self, messages: Messages, options: ChatOptions | None = None) -> dict[str, Any]:
        """A conversation as a prompt, through the checkpoint's chat template."""
        return self.prompts.of_chat(messages, options or ChatOptions(chat_template=self._chat_template))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yields the growing output after every step, or what output_kind says. Leaving the loop early aborts the
        request."""
        params = sampling_params or self.get_default_sampling_params()
        requests = self.requests_for(prompt, params, 0)
        yield from of_kind(self._stream(prompt, requests), params.output_kind)

    def _stream(self, prompt: Prompt, requests: list[Request]) -> Iterator[RequestOutput]:
        num_seen = 0

        def news() -> RequestOutput | None:
            grown = sum(request.num_outputs for request in requests) > num_seen
            ended = all(request.finished for request in requests)
            return output_of(prompt, requests) if grown or ended else None

        with self._running(requests):
            while True:
                self._shared.step()
                output = self._shared.read(news)
                if output is not None:
                    num_seen = sum(len(completion.token_ids) for completion in output.outputs)
                    yield output
                    if output.finished:
                        return

    def score(self, prompts: Sequence[Prompt], num_top: int = 0) -> list[RequestOutput]:
        """Log-probabilities of the prompts' own tokens."""
        return self.generate(list(prompts), SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=num_top))

    # helpers

    def _run(self, requests: list[Request], on_step: Callable[[int, int], None] | None) -> None:
        """Until all of them have finished. Nothing of them changes after that, so they may be read freely."""
        num_finished = 0
        with self._running(requests):
            while num_finished < len(requests):
                self._shared.step()
                num_finished = self._shared.read(lambda: sum(request.finished for request in requests))
                if on_step is not None:
                    on_step(num_finished, len(requests))

    @contextmanager
    def _running(self, requests: list[Request]) -> Iterator[None]:
        try:
            with self._shared.running(requests):
                yield
        finally:
            self._figures.add(requests)

    def requests_for(self, prompt: Prompt, params: SamplingParams, number: int) -> list[Request]:
        """The requests of one prompt (n of them), checked before anything runs."""
        self._shared.check_open()
        return self._maker.of_prompt(prompt, params, number)

    def make_requests(self, ids: list[int], params: SamplingParams, images: Images | None = None) -> list[Request]:
        """n requests for a prompt and for options that have been checked, and hold tokens instead of text."""
        return self._maker.of_ids(ids, params, images)

    def seed_of(self, params: SamplingParams) -> int:
        """The seed that was asked for, or the next of this LLM's own."""
        return seed_of(params, self._seeds)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text."""
        return self.engine.end_ids
