"""The command ``nepserve scale``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

WRONG = 2
ENGINES = ("ray",)

HELP = """Keep several servers on a cluster, as many as the queue asks for.

Each replica is a server as of `nepserve serve`, whose flags hold here as well, with the GPU, or the cores, that the
cluster gives it. Clients read their addresses from the file of --address-file, balance and fail over. Ctrl-C drains
all of them, and ends what was started.
"""


def command() -> Any:
    """The command with all its flags."""
    from . import flags
    from .scale.policy import Policy
    from .scale.run import NOT_OF_A_REPLICA

    def option(name: str, kind: Any, flag: str, text: str, default: Any = None, **more: Any) -> Any:
        return flags.parameter(name, kind, typer.Option(flag, help=text, show_default=bool(default), **more), default)

    count, share = int | None, float | None
    own = [
        option("engine", str, "--engine", "Who places the replicas: ray.", "ray"),
        option("replicas", count, "--replicas", "So many [default: one a GPU of the cluster, else 1].", min=1),
        option("least", count, "--min", "At least so many; with --max. [default: 1]", min=1),
        option("most", count, "--max", "At most so many: as the queue asks for.", min=1),
        option(
            "queue_atoms", float, "--queue-atoms", "Atoms that may wait for each; more call for another one.",
            Policy.queue_atoms, min=1,
        ),
        option("up_seconds", float, "--up-after", "Seconds that they wait before.", Policy.up_seconds, min=0),
        option(
            "down_seconds", float, "--down-after", "Seconds of little work before one is drained.",
            Policy.down_seconds, min=0,
        ),
        option("gpus", share, "--gpus", "GPUs of each, 0.5 for two on one [default: 1, 0 without any].", min=0),
        option("cpus", share, "--cpus", "Cores of each [default: 1 beside a GPU, else an equal share].", min=0.1),
        option("address_file", Path | None, "--address-file", "Where their addresses go, one a line."),
        option(
            "ray_address", str | None, "--ray-address",
            "A Ray cluster: auto for that of this node, or HOST[:PORT] [default: one of this machine is started].",
        ),
    ]  # fmt: skip
    return flags.command(scale, own, NOT_OF_A_REPLICA)


def scale(**given: Any) -> None:
    """Keep several servers on a cluster, as many as the queue asks for."""
    from . import settings
    from .flags import given_settings
    from .models import ModelNameError
    from .scale.run import Wanted, run

    try:
        if given["engine"] not in ENGINES:
            raise settings.SettingsError(f"--engine {given['engine']}: wanted {' or '.join(ENGINES)}")
        del given["engine"]
        show = given.pop("show_config")
        wanted = Wanted(**{name: given.pop(name) for name in Wanted.__dataclass_fields__})
        loaded = settings.load(given_settings(given), given.pop("config"))
        if show:
            print(settings.show(loaded), end="")  # noqa: T201
            return
        code = run(wanted, loaded)
    except (settings.SettingsError, ModelNameError) as error:
        print(f"nepserve: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(WRONG)
    sys.exit(code)
