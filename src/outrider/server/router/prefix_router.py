"""Ray Serve's choice of a replica, by what the replicas have in their pages. Every process that asks has its own."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from outrider.server.router.affinity import Affinity


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Requests are those of `Replica.ask`: what they ask for, the names of their prompt's parts, whom to avoid."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        replicas = {each.replica_id.unique_id: each for each in candidate_replicas}
        if pending_request is None:
            return [list(replicas.values())]
        pending_request.routing_context.should_backoff = True  # where none has room, it is tried again later
        _, names, avoided = pending_request.args
        wanted = [name for name in replicas if name not in avoided] or list(replicas)
        return [[replicas[name]] for name in self._affinity.ranked(names, wanted)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._affinity.sent(replica_id.unique_id, pending_request.args[1])

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._affinity.ended(replica_id.unique_id)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._affinity.forget(replica_id.unique_id)
