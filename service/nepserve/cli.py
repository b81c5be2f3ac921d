"""The command line: ``nepserve serve``, ``predict``, ``train``, ``tune``, ``ipi``, ``check`` and others.

Exit codes: 0 it worked; 1 it did not (an engine that cannot be kept alive, structures that cannot be evaluated, a model
file that is refused by ``check``); 2 the command, a setting or an input file is wrong; 130 interrupted.
Errors are one line on standard error.
"""

from __future__ import annotations

import json
import sys
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from nepcore import __version__
from nepcore.errors import InputFileError, ModelError, ModelFileError, NepError

from . import scale_cli, train_cli

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .predict import PredictResult

FAILED = 1
WRONG = 2
INTERRUPTED = 130

_SERVER_MODULES = {
    "fastapi", "httptools", "orjson", "prometheus_client", "pydantic", "pydantic_settings", "ray",
    "torch", "uvicorn",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Making flags from the settings class takes a moment that the other commands need not wait.
        build(spell_out=words[0] if words else "")(words, prog_name="nepserve")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has seen enough; Python must not complain about it at its end.
        sys.stdout = None
        sys.exit(FAILED)
    except ImportError as error:
        module = (error.name or "").partition(".")[0]
        if module not in _SERVER_MODULES:
            raise
        extra = "ray" if words[:1] == ["scale"] else "train" if words[:1] == ["train"] else "server"
        _fail(f"this needs the package {module!r}, which is not installed: pip install 'nepserve[{extra}]'", WRONG)
    except (InputFileError, ModelError, ModelFileError) as error:
        _fail(str(error), WRONG)
    except (NepError, OSError) as error:
        _fail(str(error), FAILED)
    except Exception as error:
        # The client is imported by the commands that talk to a server; the others do not wait for it.
        told = _of_a_server(error)
        if told is None:
            raise
        _fail(told, FAILED)


def _of_a_server(error: Exception) -> str | None:
    """What to say of an error that the client raised on purpose; None if it is another one."""
    from .client.errors import NepserveError, ServerError

    if not isinstance(error, NepserveError):
        return None
    key = " The key is given with --api-key or NEPSERVE_API_KEY."
    refused = isinstance(error, ServerError) and error.status == HTTPStatus.UNAUTHORIZED
    return " ".join(str(error).split()) + (key if refused else "")


def build(spell_out: str = "") -> typer.Typer:
    """The commands; of ``serve`` and ``scale``, the flags of the one that is named alone."""
    app = typer.Typer(
        help="Energies, forces and stress from NEP models: over HTTP, from files, or from Python.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.command("serve", help=_SERVE_HELP)(_with_settings(_serve) if spell_out == "serve" else _serve)
    app.command("scale", help=scale_cli.HELP)(scale_cli.command() if spell_out == "scale" else scale_cli.scale)
    app.command("predict")(predict)
    app.command("train")(train_cli.train)
    app.command("export-split")(train_cli.export_split)
    app.command("ipi")(ipi)
    app.command("tune")(tune)
    app.command("check")(check)
    app.command("env")(env)
    app.command("version")(version)
    return app


_SERVE_HELP = """Serve models over HTTP.

Each MODEL is a nep.txt, or a folder with one (nep.txt, else nep_best.txt), optionally with a name: NAME=PATH. Without
MODEL a small model of seven metals is served, a demonstration.

Every flag can also be a variable (NEPSERVE_PORT) or a key of the TOML file of --config (port); --show-config says what
is in force and where it came from.
"""


def _with_settings(run: Callable[..., None]) -> Any:
    from .flags import command

    return command(run)


def _serve(**given: Any) -> None:
    """Serve models over HTTP."""
    from . import settings
    from .flags import given_settings
    from .models import ModelNameError

    config, show = given.pop("config", None), given.pop("show_config", False)
    try:
        loaded = settings.load(given_settings(given), config)
        if show:
            print(settings.show(loaded), end="")  # noqa: T201
            return
        from . import server

        code = server.run(loaded)
    except (settings.SettingsError, ModelNameError) as error:
        _fail(str(error), WRONG)
    sys.exit(code)


def predict(
    structures: Annotated[str, typer.Argument(metavar="FILE", help="Extended XYZ (.gz too), - for standard input.")],
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="A nep.txt, or a folder with one; with --url a name there.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", help="Extended XYZ to write (.gz too), - for standard output.")
    ] = "-",
    gpumd_out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write energy_, force_, virial_ and stress_*.out there.")
    ] = None,
    properties: Annotated[
        str | None, typer.Option("--properties", "-p", help="What to write, with commas between.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    backend: Annotated[str, typer.Option(help="How the physics is computed.")] = "auto",
    devices: Annotated[
        str | None, typer.Option(help="Several devices: all, numbers of GPUs such as 0,1, or cpu:N; an engine each.")
    ] = None,
    url: Annotated[
        list[str] | None, typer.Option(help="Let this server evaluate; several share the work, or file:PATH of them.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="NEPSERVE_API_KEY", help="The servers' key.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where a run with the same arguments was cut off.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave frames out that cannot be evaluated.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress and no summary.")] = False,
) -> None:
    """Evaluate the structures of a file, however large it is."""
    from . import predict as run
    from .models import locate

    # Given once, it may be a file of addresses, or several with commas between.
    servers = ",".join(url) if url else None
    if model is None and servers is None:
        _fail("give a model: --model nep.txt (or --url of a server)", WRONG)
    if model is not None and servers is None:
        model = str(locate(Path(model)))
    if servers is not None:
        _check_server(servers, api_key)
    chosen = run.DEFAULT_PROPERTIES if properties is None else tuple(w.strip() for w in properties.split(","))
    try:
        result = run.predict(
            structures, model, output, device=device, dtype=dtype, backend=backend, gpumd_dir=gpumd_out,
            properties=chosen, skip_bad=skip_bad, progress=not quiet, url=servers, api_key=api_key, devices=devices,
            resume=resume,
        )  # fmt: skip
    except run.ResumeError as error:
        _fail(str(error), WRONG)
    except run.OutputError as error:
        _fail(str(error), FAILED)
    if not quiet:
        for line in _summary(result):
            print(line, file=sys.stderr)  # noqa: T201
    if result.failed:
        sys.exit(FAILED)


def _check_server(url: str, api_key: str | None) -> None:
    """Refuse an address or a key that no server can have, before a file is opened."""
    from .client.options import check_key
    from .client.replicas import Replicas

    try:
        Replicas(url)
        check_key(api_key)
    except ValueError as error:
        _fail(str(error), WRONG)


def _summary(result: PredictResult) -> list[str]:
    """What a run did, for people."""
    lines = [f"warning: {text}" for text in result.warnings]
    lines += [f"left out: frame {f.frame + 1} (line {f.line}): {f.reason}" for f in result.failures]
    if result.failed > len(result.failures):
        lines.append(f"left out: {result.failed - len(result.failures)} more frames")
    speed = result.atoms / max(result.evaluation_seconds, 1e-9)
    lines.append(
        f"{result.frames:,} frames, {result.atoms:,} atoms in {result.seconds:.2f} s, "
        f"evaluated in {result.evaluation_seconds:.2f} s of it ({speed:,.0f} atoms/s)"
    )
    errors = [
        f"{name} {value:.4g} {unit}"
        for name, value, unit in (
            ("energy", result.rmse_energy, "eV/atom"),
            ("forces", result.rmse_forces, "eV/Å"),
            ("virial", result.rmse_virial, "eV/atom"),
        )
        if value is not None
    ]
    if errors:
        lines.append(f"RMSE against the labels of the file: {', '.join(errors)}")
    return lines


def ipi(
    address: Annotated[str, typer.Option(help="Where i-PI listens: host:port, or unix:NAME.")],
    url: Annotated[str, typer.Option(help="The nepserve server.")],
    structure: Annotated[
        Path, typer.Option(help="XYZ file that tells the species, in the order of i-PI's input; its first frame.")
    ],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model of the server, if it has several.")] = None,
    temperature: Annotated[float | None, typer.Option(help="K, for temperature models.")] = None,
    molecule: Annotated[bool, typer.Option("--molecule", help="Not periodic, whatever the cell.")] = False,
    connections: Annotated[int, typer.Option(help="Connections to i-PI: structures under way at a time.")] = 1,
    wait: Annotated[float, typer.Option(help="Seconds to wait for i-PI and for the server to be there.")] = 60.0,
    timeout: Annotated[float, typer.Option(help="Seconds for one evaluation, restarts of the server included.")] = 60.0,
    api_key: Annotated[str | None, typer.Option(envvar="NEPSERVE_API_KEY", help="The server's key.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
) -> None:
    """Give i-PI the forces of a served model."""
    from nepcore.files import xyz

    from .client import NepserveError
    from .client import ipi as bridge

    def say(text: str) -> None:
        if not quiet:
            print(f"nepserve: {text}", file=sys.stderr, flush=True)  # noqa: T201

    try:
        frame = next(xyz.read_blocks(structure, max_atoms=1)).structures.view(0)
        steps = bridge.run(
            address, url, frame.numbers, model=model, pbc=not molecule, temperature=temperature,
            connections=connections, wait_seconds=wait, report=say, timeout=timeout, api_key=api_key,
        )  # fmt: skip
    except StopIteration:
        _fail(f"{structure} has no structure", WRONG)
    except ValueError as error:
        _fail(str(error), WRONG)
    except (NepserveError, bridge.ProtocolError) as error:
        _fail(f"stopped, no forces were sent: {error}", FAILED)
    say(f"i-PI is done, {steps} force messages")


def tune(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A nep.txt, or a folder with one.")],
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 ...")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    tune_seconds: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Budget; left out, everything is measured, compiled forms too: minutes. Ctrl-C ends it.",
        ),
    ] = None,
) -> None:
    """Measure every way to evaluate a model on this machine; the server uses what was chosen."""
    from . import tune as run

    def say(text: str) -> None:
        print(f"nepserve: {text}", file=sys.stderr, flush=True)  # noqa: T201

    seconds = run.EVERYTHING if tune_seconds is None else tune_seconds
    print(run.tune(model, device=device, dtype=dtype, seconds=seconds, say=say))  # noqa: T201


def check(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A nep.txt, or a folder with one.")],
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
) -> None:
    """Say what a model file is, what it cannot give, and what is odd about it."""
    from .check import check as look
    from .models import locate

    try:
        report = look(locate(model))
    except ModelFileError as error:
        _fail(str(error), FAILED)
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))  # noqa: T201
    elif report.error is not None:
        _fail(str(report.error), FAILED)
    else:
        print("\n".join(report.lines()))  # noqa: T201
    sys.exit(report.exit_code)


def env(as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False) -> None:
    """Print what a bug report needs: versions, processors, GPUs, torch build, caches."""
    from .environment import report, text

    sections = report()
    print(json.dumps(sections, indent=2) if as_json else text(sections))  # noqa: T201


def version() -> None:
    """Print the version."""
    print(f"nepserve {__version__}")  # noqa: T201


def _fail(message: str, code: int) -> NoReturn:
    print(f"nepserve: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
