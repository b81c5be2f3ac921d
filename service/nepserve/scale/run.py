"""``nepserve scale`` from its flags to its end."""

from __future__ import annotations

import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nepserve import logs, models
from nepserve.app.auth import keys_of
from nepserve.partial_file import OutputError
from nepserve.server import ABORTED, GAVE_UP, WRONG, open_models
from nepserve.settings import FIELDS, SettingsError

from .group import Group, GroupError
from .policy import Policy
from .ray_cluster import ClusterError, RayCluster, Share

if TYPE_CHECKING:
    from nepserve.settings import Loaded, Settings

log = logging.getLogger("nepserve")

NOT_OF_A_REPLICA = ("port", "uds", "frame_socket")
"""Settings of one server that several on a node cannot share."""

_PATHS = ("model_dir", "api_key_file", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True)
class Wanted:
    """What was asked for; None where it was left out.

    Attributes:
        replicas: Exactly so many.
        least, most: Between so many.
        queue_atoms, up_seconds, down_seconds: See :class:`.policy.Policy`.
        gpus, cpus: What each replica gets.
        address_file: Where addresses go.
        ray_address: The cluster.
    """

    replicas: int | None = None
    least: int | None = None
    most: int | None = None
    queue_atoms: float = Policy.queue_atoms
    up_seconds: float = Policy.up_seconds
    down_seconds: float = Policy.down_seconds
    gpus: float | None = None
    cpus: float | None = None
    address_file: Path | None = None
    ray_address: str | None = None

    def check(self) -> None:
        """Refuse what contradicts itself.

        Raises:
            SettingsError: Naming the flag.
        """
        if self.replicas is not None and (self.least is not None or self.most is not None):
            raise SettingsError("--replicas is a fixed number; leave it out where --min and --max are given")
        if self.least is not None and self.most is None:
            raise SettingsError("--min needs --max")
        if self.most is not None and self.most < (self.least or 1):
            raise SettingsError(f"--max {self.most} is less than --min {self.least or 1}")
        if self.gpus is not None and self.gpus > 1 and self.gpus != int(self.gpus):
            raise SettingsError(f"--gpus {self.gpus:g}: wanted a part of one GPU, or a whole number of them")

    def policy(self, gpus: float, share: float) -> Policy:
        """How many replicas, on a cluster of so many GPUs of which each gets a share."""
        number = self.replicas or (max(1, int(gpus / share)) if share else 1)
        least, most = (number, number) if self.most is None else (self.least or 1, self.most)
        return Policy(least, most, self.queue_atoms, self.up_seconds, self.down_seconds)


def run(wanted: Wanted, loaded: Loaded, *, loader: str = "nepcore:load") -> int:
    """Keep replicas until told to stop; returns the exit code.

    0 after SIGTERM or SIGINT, 1 if no replica can be kept, 2 if a model or setting is wrong, 130 if a second SIGINT
    ended all at once.

    Raises:
        SettingsError, ModelNameError, ModelFileError: Nothing was started.
    """
    # One socket cannot be that of several; whether others can reach them is a matter of the host alone.
    settings = loaded.settings.model_copy(update={"uds": None, "frame_socket": None})
    logs.configure(settings.log_format, settings.log_level)
    for remark in loaded.remarks:
        log.warning("%s", remark)
    wanted.check()
    open_models(settings)
    _, secret = keys_of(settings)
    values = plain(loaded)
    if secret is not None:
        values["api_keys"] = [*values.get("api_keys", ()), f"made-at-start:{secret}:admin"]
    address_file = None if wanted.address_file is None else wanted.address_file.absolute()
    early = _defer_interrupt() if wanted.ray_address is None else []
    try:
        with RayCluster(wanted.ray_address) as cluster:
            gpus = _gpus_of_each(wanted, settings, cluster)
            policy = wanted.policy(cluster.gpus, gpus)
            cpus = wanted.cpus or (1 if gpus else cluster.cores_for(policy.most))
            share = Share(gpus, cpus)
            values = with_devices(values, share)
            cluster.order(values, loader, share, here=settings.is_local)
            group = Group(cluster, policy, address_file, drain_seconds=settings.shutdown_timeout)
            # Ray has handlers of its own, which would leave replicas to themselves.
            group.handle_signals()
            group.stopping = bool(early)
            _greet(policy, share, settings, cluster)
            if secret is not None:
                print(f"API key made for this run: {secret}", file=sys.stderr)  # noqa: T201
            group.run()
    except (GroupError, ClusterError, OutputError) as error:
        log.error("%s", error)
        return WRONG if isinstance(error, GroupError) and error.wrong else GAVE_UP
    return ABORTED if group.aborting else 0


def plain(loaded: Loaded) -> dict[str, Any]:
    """The settings that were said, as plain values, with paths that hold wherever a replica starts.

    Nothing of a node's own environment or files then makes one replica different from the others.
    """
    settings = loaded.settings
    found: dict[str, Any] = {"port": 0}
    for name in FIELDS:
        value = getattr(settings, name)
        if loaded.origins[name] == "default" or name in NOT_OF_A_REPLICA or value is None:
            continue
        if name == "models":
            value = [f"{key}={path.absolute()}" for key, path in models.parse_models(value).items()]
        elif name == "api_keys":
            value = [key.get_secret_value() for key in value]
        elif name in _PATHS:
            value = str(Path(value).absolute())
        found[name] = list(value) if isinstance(value, tuple) else value
    return found


def with_devices(values: dict[str, Any], share: Share) -> dict[str, Any]:
    """The settings of a replica with what Ray gives it, where they do not say more."""
    if "device" in values or "devices" in values:
        return values
    if share.gpus > 1:
        return {**values, "devices": "all"}
    if share.gpus:
        return {**values, "device": "cuda"}
    return {"threads": max(1, int(share.cpus)), **values, "device": "cpu"}


def _defer_interrupt() -> list[int]:
    """Let Ctrl-C wait until a Ray of our own has started: cut short, it would leave parts of it behind for a while.

    Returns:
        Is not empty once it came. A second one does not wait.
    """
    came: list[int] = []

    def note(number: int, _: object) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)
        log.info("SIGINT: it ends when Ray has started (Ctrl-C ends it at once)")

    signal.signal(signal.SIGINT, note)
    return came


def _gpus_of_each(wanted: Wanted, settings: Settings, cluster: RayCluster) -> float:
    if wanted.gpus is not None:
        return wanted.gpus
    on_cpu = settings.device == "cpu" or (settings.devices or "").strip().lower().startswith("cpu")
    return 1.0 if cluster.gpus and not on_cpu else 0.0


def _greet(policy: Policy, share: Share, settings: Settings, cluster: RayCluster) -> None:
    number = f"{policy.least}" if policy.least == policy.most else f"{policy.least} to {policy.most}"
    place = "a Ray of this machine alone" if cluster.own else "the Ray cluster"
    log.info("replicas: %s, with %s each, on %s", number, share, place)
    if settings.is_local and not cluster.own:
        log.warning("replicas listen on %s and are all placed on this node; --host 0.0.0.0 uses others", settings.host)
