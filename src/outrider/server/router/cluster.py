"""Replicas on a Ray cluster: Ray Serve places them, looks after them, and starts as many as there is work for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import RequestRouterConfig

from outrider.server.command import Plan
from outrider.server.errors import ApiError, internal_error
from outrider.server.log import log
from outrider.server.router.fleet import Asked, LostError, nobody
from outrider.server.router.replica import Replica
from outrider.server.serve_options import RayOptions

APPLICATION, DEPLOYMENT = "outrider", "replica"  # as Ray's own tools show them
CHECK_SECONDS, CHECK_TIMEOUT = 1.0, 30.0  # from one look at a replica's health to the next, and what it may take
STORE_BYTES = 2**27  # of a cluster of our own: what travels between processes is small
LOCAL = "local"


@contextmanager
def deployed(plan: Plan, options: RayOptions) -> Iterator[Any]:
    """The handle of replicas that are ready. In the end they are ended, and the cluster too if it was started here."""
    is_ours = _connect(options.ray_address)
    try:
        serve.start(proxy_location="Disabled")  # requests come through our own router
        yield serve.run(_application(plan, options), name=APPLICATION, route_prefix=None)
    finally:
        with suppress(RayError):
            serve.shutdown() if is_ours else serve.delete(APPLICATION)
        ray.shutdown()


def _connect(address: str | None) -> bool:
    """To a cluster that runs, or to a new one: true if so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    settings: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if address != LOCAL:
        try:
            ray.init(address=address or "auto", **settings)
            return False
        except ConnectionError as error:
            if address is not None:
                raise ValueError(f"there is no Ray cluster at {address}: start one with `ray start --head`") from error
    os.environ.setdefault("RAY_worker_niceness", "0")  # replicas serve: anything else on the machine would go first
    ray.init(address="local", include_dashboard=False, object_store_memory=STORE_BYTES, **settings)
    return True


def _application(plan: Plan, options: RayOptions) -> Any:
    fewest, most = options.replicas
    target, engine = options.target_requests, plan.options
    num_ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    has_gpus = engine.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= num_ranks
    num_gpus = num_ranks if has_gpus else 0
    cpus = options.cpus_per_replica * (1 if has_gpus else num_ranks)
    scaling: dict[str, Any] = {"num_replicas": fewest}
    if most > fewest:
        limits = {"min_replicas": fewest, "max_replicas": most, "initial_replicas": fewest}
        scaling = {"autoscaling_config": {**limits, "target_ongoing_requests": target}}
    kind = serve.deployment(
        Replica,
        name=DEPLOYMENT,
        max_ongoing_requests=2 * target,  # the rest waits where it can go to a replica that is started for it
        ray_actor_options={"num_cpus": cpus, "num_gpus": num_gpus},
        # one bundle: an engine's ranks are on one machine
        placement_group_bundles=[{"CPU": cpus, "GPU": num_gpus} if num_gpus else {"CPU": cpus}],
        placement_group_strategy="STRICT_PACK",
        health_check_period_s=CHECK_SECONDS,
        health_check_timeout_s=CHECK_TIMEOUT,
        graceful_shutdown_timeout_s=plan.limits.shutdown_timeout,
        graceful_shutdown_wait_loop_s=0.2,
        request_router_config=RequestRouterConfig(
            request_router_class="outrider.server.router.prefix_router:PrefixRouter"
        ),
        **scaling,
    )
    access = replace(plan.access, hosts=frozenset(), origins=frozenset(), pace=0.0)  # checked where clients come in
    return kind.bind(replace(plan, access=access, root_path=""))


class RayAnswer:
    """Of a replica that has taken the request."""

    def __init__(self, replica: str, items: Any, status: int, headers: list[tuple[str, str]]) -> None:
        self.replica, self.status, self.headers = replica, status, headers
        self._items, self._has_ended = items, False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        while True:
            try:
                yield await anext(self._items)
            except StopAsyncIteration:
                self._has_ended = True
                return
            except RayError as error:
                self._has_ended = True
                raise _lost(error) from error

    async def close(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._items.cancel()


class RayFleet:
    """`patience`: seconds that a request waits for a replica that takes it."""

    def __init__(self, handle: Any, patience: float) -> None:
        self._handle, self._patience = handle.options(stream=True), patience
        self.num_ready = 0
        self._counting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.num_ready = await asyncio.to_thread(_num_running)
        self._counting = asyncio.create_task(self._count())

    async def stop(self) -> None:
        if self._counting is not None:
            self._counting.cancel()

    async def ask(self, asked: Asked, names: Sequence[bytes], avoided: Collection[str]) -> RayAnswer:
        items = self._handle.ask.remote(asked, list(names), sorted(avoided))
        try:
            async with asyncio.timeout(self._patience):
                replica = await anext(items)
            status, headers = await anext(items)
        except RayError as error:
            raise _lost(error) from error
        except TimeoutError:
            items.cancel()
            raise nobody() from None
        except BaseException:
            items.cancel()
            raise
        return RayAnswer(replica, items, status, headers)

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            found = await asyncio.to_thread(_num_running)
            if found != self.num_ready:
                log("replicas", logging.WARNING if found < self.num_ready else logging.INFO, running=found)
            self.num_ready = found


def _lost(error: RayError) -> LostError | ApiError:
    """A replica that has gone; a fault in its code is nobody else's to try again."""
    return internal_error(error) if isinstance(error, RayTaskError) else LostError(type(error).__name__)


def _num_running() -> int:
    try:
        state = serve.status().applications[APPLICATION].deployments[DEPLOYMENT]
    except (KeyError, RayError):
        return 0
    return state.replica_states.get("RUNNING", 0)
