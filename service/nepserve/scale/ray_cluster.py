"""Replicas as actors on a Ray cluster: one that is there, or a small one of this machine alone."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .host import Ended, Host, Look

if TYPE_CHECKING:
    from collections.abc import Mapping

    from typing_extensions import Self

log = logging.getLogger("nepserve")

STORE_BYTES = 100_000_000
"""Object store of a cluster of our own: nothing of size passes through it."""

DEFAULT_PORT = 6379

_CALLS = 4  # of an actor at a time: its life, a look, a drain
_QUIET = {
    # Nothing is sent to Ray's makers.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Each line of a log counts, also one that several replicas write.
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
}


class ClusterError(RuntimeError):
    """There is no cluster, or it cannot be used."""


@dataclass(frozen=True)
class Share:
    """What each replica gets.

    Attributes:
        gpus: GPUs; below 1, a part of one that several share.
        cpus: Cores.
    """

    gpus: float
    cpus: float

    def __str__(self) -> str:
        return f"{self.gpus:g} GPU and {self.cpus:g} CPU"


class RayReplica:
    """One actor. See :class:`.group.Placed`."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self.look: Look | None = None
        self.ended: Ended | None = None
        self._ray = ray
        self._actor = actor
        self._life = actor.live.remote()
        self._looking: Any = None

    @property
    def life(self) -> Any:
        """Reference that is there when the replica has ended."""
        return self._life

    def ask(self) -> None:
        """Ask how it is, unless that was asked and not answered."""
        if self.ended is None and self._looking is None:
            self._looking = self._actor.look.remote()

    def hear(self) -> None:
        """Take in what it said."""
        errors = self._ray.exceptions.RayError
        if self._looking is not None and self._is_there(self._looking):
            # An actor that is lost is told of by the end of its life.
            with contextlib.suppress(errors):
                self.look = self._ray.get(self._looking) or self.look
            self._looking = None
        if self.ended is None and self._is_there(self._life):
            try:
                self.ended = self._ray.get(self._life)
            except errors as error:
                self.ended = Ended(None, [_told(error)])

    def drain(self) -> None:
        """See :meth:`.group.Placed.drain`."""
        self._actor.drain.remote()

    def kill(self) -> None:
        """See :meth:`.group.Placed.kill`."""
        self._ray.kill(self._actor)

    def _is_there(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])


class RayCluster:
    """See :class:`.group.Cluster`; a context, at whose end the connection, or the cluster of our own, ends.

    Args:
        address: ``auto``, ``HOST`` or ``HOST:PORT`` of a cluster; None starts one on this machine, for this machine.

    Raises:
        ClusterError: There is none.
    """

    def __init__(self, address: str | None) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        own = address is None
        if own:
            _keep_to_this_machine()
        import ray

        self._ray: Any = ray
        self.own = own
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
        if own:
            options |= {
                "address": "local", "include_dashboard": False, "object_store_memory": STORE_BYTES,
                "_node_ip_address": "127.0.0.1",
            }  # fmt: skip
        else:
            options["address"] = _spell(str(address))
        try:
            ray.init(**options)
        except (ConnectionError, OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = "on this machine" if own else f"at {address}"
            raise ClusterError(f"no Ray cluster {where}: {_told(error)}") from None
        self._replicas: list[RayReplica] = []
        self._order: tuple[dict[str, Any], str] = ({}, "")
        self._share = Share(0, 1)
        self._here = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    @property
    def gpus(self) -> float:
        """GPUs of the cluster."""
        return float(self._ray.cluster_resources().get("GPU", 0))

    def cores_for(self, replicas: int) -> int:
        """Cores of each of so many replicas, shared out evenly; no more than the largest node has."""
        cores = [float(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        return max(1, int(min(sum(cores) / replicas, max(cores, default=1))))

    def order(self, settings: Mapping[str, Any], loader: str, share: Share, *, here: bool) -> None:
        """Say what replicas are to be.

        Args:
            settings: See :class:`.host.Host`.
            loader: See :class:`.host.Host`.
            share: What each gets.
            here: Whether all are placed on the node of this program, since they cannot be reached from others.
        """
        self._order, self._share, self._here = (dict(settings), loader), share, here
        whole = self._ray.cluster_resources()
        if share.gpus > whole.get("GPU", 0) or share.cpus > whole.get("CPU", 0):
            message = f"a replica needs {share}, and the cluster has {self._has(whole)}"
            if self.own:
                raise ClusterError(message)
            log.warning("%s now", message)

    def place(self, number: int) -> RayReplica:
        """See :meth:`.group.Cluster.place`."""
        context = self._ray.get_runtime_context()
        strategy: Any = "SPREAD"
        if self._here:
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            strategy = NodeAffinitySchedulingStrategy(context.get_node_id(), soft=False)
        actor = self._ray.remote(NepserveReplica).options(
            num_gpus=self._share.gpus, num_cpus=self._share.cpus, max_concurrency=_CALLS, scheduling_strategy=strategy,
            # Who takes the place of one that ends is the group's business: there may be room elsewhere.
            max_restarts=0,
        )  # fmt: skip
        replica = RayReplica(self._ray, actor.remote(number, *self._order))
        self._replicas.append(replica)
        return replica

    def wait(self, seconds: float) -> None:
        """See :meth:`.group.Cluster.wait`."""
        self._replicas = [replica for replica in self._replicas if replica.ended is None]
        for replica in self._replicas:
            replica.ask()
        lives = [replica.life for replica in self._replicas]
        if lives:
            self._ray.wait(lives, num_returns=1, timeout=seconds)
        else:
            time.sleep(seconds)
        for replica in self._replicas:
            replica.hear()

    def room(self) -> str:
        """See :meth:`.group.Cluster.room`."""
        free = self._has(self._ray.available_resources())
        return f"it starts, or waits for room: it needs {self._share}, and {free} are free"

    @staticmethod
    def _has(resources: Mapping[str, float]) -> str:
        return str(Share(resources.get("GPU", 0), resources.get("CPU", 0)))


class NepserveReplica(Host):
    """A replica where Ray put it."""

    def __init__(self, number: int, settings: Mapping[str, Any], loader: str) -> None:
        from ray.util import get_node_ip_address

        address = get_node_ip_address()
        # Ray on one machine alone knows no other address of it; its name is one.
        super().__init__(number, settings, loader, None if address.startswith("127.") else address)


def _keep_to_this_machine() -> None:
    """Have a cluster of our own listen on loopback addresses alone, and take no orders from others."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.pop("RAY_ADDRESS", None)
    if "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


def _spell(address: str) -> str:
    if "://" in address:
        raise ClusterError(f"--ray-address {address}: wanted auto, or HOST or HOST:PORT of the cluster's head")
    return address if address == "auto" or ":" in address else f"{address}:{DEFAULT_PORT}"


def _told(error: BaseException) -> str:
    """The line of a long text that says it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
