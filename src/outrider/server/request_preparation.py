"""From a submitted job to the engine's requests. Where that takes long it is done beside the engine's loop, on threads
of its own, so that nobody's round waits: a grammar is compiled, an image is looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from outrider.engine.request import Request
from outrider.grammar.trial import NICENESS
from outrider.lanes import Lane
from outrider.llm import LLM
from outrider.overload import OverloadError
from outrider.server.continuation import resume
from outrider.server.errors import ApiError, bad_request, clean, internal_error, overloaded, past_deadline
from outrider.server.protocol import Submit

NUM_COMPILERS, MAX_GRAMMARS = 2, 64  # threads for grammars, and how many wait for them
NUM_VIEWERS, MAX_VIEWS = 1, 16  # the same for images: memory holds those of one request


@dataclass(frozen=True)
class Prepared:
    """What became of a submitted job."""

    asked: Submit
    made: list[Request] | ApiError


class RequestPreparation:
    """`is_open`: whether a job is still wanted; `done` is called with what was prepared, from any thread."""

    def __init__(
        self, llm: LLM, model_name: str, is_open: Callable[[int], bool], done: Callable[[Prepared], None]
    ) -> None:
        self._llm, self._model_name, self._is_open, self._done = llm, model_name, is_open, done
        self._grammars = Lane("grammars", NUM_COMPILERS, 4 * MAX_GRAMMARS, niceness=NICENESS)
        self._new_grammars = Lane("new grammars", NUM_COMPILERS, MAX_GRAMMARS, max_wait=30.0, niceness=NICENESS)
        self._images = Lane("images", NUM_VIEWERS, MAX_VIEWS)

    def close(self) -> None:
        for lane in (self._grammars, self._new_grammars, self._images):
            lane.close()

    def start(self, asked: Submit) -> Prepared | None:
        """None where it takes long: then it is told when it is done."""
        lane = self._lane(asked)
        if lane is None:
            return Prepared(asked, self._prepare(asked))
        self._prepare_beside(asked, lane)
        return None

    def _lane(self, asked: Submit) -> Lane | None:
        """Who prepares it, where rounds would wait for that: a grammar is compiled, an image is looked at, tokens of
        an answer that was begun elsewhere are read."""
        if any(isinstance(prompt, Mapping) for prompt in asked.prompts):
            return self._images
        return self._grammars if asked.begun or any(params.guided is not None for params in asked.params) else None

    def _prepare_beside(self, asked: Submit, lane: Lane) -> None:
        def done(future: Future[list[Request] | ApiError | None]) -> None:
            if future.cancelled():
                return
            error = future.exception()
            made = future.result() if error is None else self._refusal(error)
            if made is None:  # those who ask for what is known do not wait for it
                self._prepare_beside(asked, self._new_grammars)
            else:
                self._done(Prepared(asked, made))

        try:
            lane.submit(lambda: self._prepare_unless_new(asked, lane)).add_done_callback(done)
        except OverloadError as error:
            self._done(Prepared(asked, overloaded(error)))

    def _prepare_unless_new(self, asked: Submit, lane: Lane) -> list[Request] | ApiError | None:
        """None where it has a grammar that must be tried first, and this is not the lane for it."""
        if lane is self._grammars:
            trial = self._llm.engine.grammars.trial
            if not all(trial.is_known(each.guided) for each in asked.params if each.guided is not None):
                return None
        return self._prepare(asked)

    def _prepare(self, asked: Submit) -> list[Request] | ApiError:
        """What the engine complains of is the client's to mend."""
        if not self._is_open(asked.job):  # it has ended while it waited for this
            return past_deadline()
        try:
            for guided in {id(each.guided): each.guided for each in asked.params if each.guided is not None}.values():
                self._llm.engine.grammars.trial.check(guided)
            groups = [
                self._llm.requests_for(prompt, params, number)
                if isinstance(prompt, Mapping)
                else self._llm.make_requests(prompt, params)
                for number, (prompt, params) in enumerate(zip(asked.prompts, asked.params, strict=True))
            ]
            for group in groups if not asked.streams else ():
                for request in group[1:]:  # answers to one prompt: one of them brings its log-probabilities
                    request.params = replace(request.params, prompt_logprobs=None)
            made = [request for group in groups for request in group]
            if asked.begun:
                resume(made, asked.begun, self._llm.max_model_len)
            return made
        except Exception as error:
            return self._refusal(error)

    def _refusal(self, error: BaseException) -> ApiError:
        if isinstance(error, OverloadError):
            return overloaded(error)
        if isinstance(error, RecursionError):
            return bad_request("the request is nested too deeply")
        if isinstance(error, ValueError):
            return bad_request(clean(str(error), {str(self._llm.config.model): self._model_name}))
        return internal_error(error)
