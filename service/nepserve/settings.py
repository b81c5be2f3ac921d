"""The server's settings: one class behind flags, ``NEPSERVE_*`` variables and a TOML file.

A flag beats a variable, a variable beats the file, the file beats the default. :func:`load` also says where each
value came from, which ``nepserve serve --show-config`` prints.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, SettingsConfigDict, TomlConfigSettingsSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic_settings import PydanticBaseSettingsSource

PREFIX = "NEPSERVE_"

# Variables that Kubernetes sets in every pod beside a Service called "nepserve"; they are no settings of ours.
_SERVICE_LINK_SUFFIXES = ("_SERVICE_HOST", "_SERVICE_PORT", "_TCP", "_TCP_ADDR", "_TCP_PORT", "_TCP_PROTO", "_UDP")

_NOT_OF_SERVE = frozenset({"config", "api_key", "cache_dir"})
"""Endings of variables that other parts of the program read."""

Words = Annotated[tuple[str, ...], NoDecode]


class SettingsError(ValueError):
    """A setting that cannot be used; the text names the flag, variable or file it came from."""


class Settings(BaseSettings):
    """What a server is told at its start. Times are seconds and sizes megabytes (10⁶ bytes) unless a name says other.

    Every field is a flag (``max_body_mb`` is ``--max-body-mb``), a variable (``NEPSERVE_MAX_BODY_MB``) and a key of
    the TOML file (``max_body_mb``). Lists are repeated flags, comma-separated variables and TOML arrays.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True)

    models: Words = Field((), description="Models to serve, each [name=]PATH of a nep.txt or of a folder with one.")
    default_model: str | None = Field(None, description="Model of requests that name none.")
    model_dir: Path | None = Field(
        None, description="Folder that models may be loaded from, by path, while the server runs."
    )

    host: str = Field("127.0.0.1", description="Address to listen on; any but a loopback address asks for a key.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    uds: Path | None = Field(None, description="Listen on this unix socket instead of host and port.")
    fronts: int = Field(
        1, ge=1, le=64, description="Processes that speak HTTP on the port; more than one where GPUs wait for it."
    )

    frame_socket: str | None = Field(
        None, description="Speak the compact frames of sessions here, too: a port, or the path of a unix socket."
    )

    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1 ...")
    devices: str | None = Field(
        None, description="Several devices instead of one: all, numbers of GPUs such as 0,1, or cpu:N; one engine each."
    )
    dtype: Words = Field(
        ("float32",), description="float32 or float64; name=float64 for one model, may be given several times."
    )
    backend: str = Field("auto", description="How the physics is computed: auto (measured), rule, or a backend.")
    tune_seconds: float | None = Field(
        None,
        ge=0,
        description="Seconds to measure backends at the first start; left out, 180 on a GPU and 30 on a CPU.",
    )
    threads: int | None = Field(None, ge=1, description="Threads of the engine on a CPU; left out, one a core.")

    max_body_mb: float = Field(256.0, gt=0, description="Largest request body, after decompression.")
    max_structures: int = Field(100_000, ge=1, description="Most structures in one request.")
    max_atoms: int = Field(4_000_000, ge=1, description="Most atoms in one request.")
    max_queue_atoms: int = Field(20_000_000, ge=1, description="Atoms that may wait before requests are refused (429).")
    max_queue_requests: int = Field(4096, ge=1, description="Requests that may wait before others are refused (429).")
    max_batch_ms: float | None = Field(
        None, gt=0, description="Device time of one batch; left out, 20 on a GPU and 100 on a CPU."
    )
    max_connections: int = Field(4096, ge=1, description="Connections held open at once.")

    session_idle: float = Field(600.0, gt=0, description="Seconds without a step after which a session is dropped.")
    max_sessions: int = Field(10_000, ge=1, description="Sessions kept; one more, and the least lately used goes.")
    max_sessions_per_key: int = Field(1_000, ge=1, description="Sessions kept of one key, or of one address.")

    request_timeout: float = Field(
        600.0, gt=0, description="Seconds a request may take before it is answered with 504; clients may ask for less."
    )
    receive_timeout: float = Field(
        30.0, gt=0, description="Seconds a client may take to send its request, plus one second a megabyte."
    )
    keep_alive: float = Field(75.0, gt=0, description="Seconds an idle connection is kept.")
    shutdown_timeout: float = Field(30.0, ge=0, description="Seconds that work in flight may take after SIGTERM.")

    engine_timeout: float = Field(
        120.0, gt=0, description="Seconds without a sign of life after which the engine counts as hung."
    )
    engine_restarts: int = Field(5, ge=0, description="Engine failures in ten minutes after which the server gives up.")
    probe_interval: float = Field(30.0, gt=0, description="Seconds between evaluations of the known answer.")

    log_format: Literal["text", "json"] = Field("text", description="text or json, one line an event.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="debug, info, warning or error."
    )
    access_log: bool = Field(False, description="Log every request.")
    tracing: bool = Field(
        False, description="Send a trace of each request to where the OTEL_* variables say; needs nepserve[otel]."
    )

    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = Field(
        (), description="Keys as name:key, or name:key:admin; better in a file or a variable than as a flag."
    )
    api_key_file: Path | None = Field(None, description="File of keys, one a line: name key [admin].")
    insecure: bool = Field(False, description="Ask for no key although the address can be reached from elsewhere.")
    ssl_certfile: Path | None = Field(None, description="Certificate chain (PEM) for https.")
    ssl_keyfile: Path | None = Field(None, description="Private key (PEM) of the certificate.")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 (the signature is pydantic's)
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take arguments alone: :func:`load` reads the other sources one by one, to know who said what."""
        return (init_settings,)

    @field_validator("models", "dtype", "api_keys", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """A comma-separated string is a list; so is one that came alone."""
        if isinstance(value, str):
            return tuple(word.strip() for word in value.split(",") if word.strip())
        return value

    @field_validator("dtype")
    @classmethod
    def _known_dtypes(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for word in value:
            if word.rpartition("=")[2] not in {"float32", "float64"}:
                raise ValueError(f"{word!r} is neither float32 nor float64, nor NAME=float32 or NAME=float64")
        return value or ("float32",)

    @model_validator(mode="after")
    def _pairs(self) -> Settings:
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile are needed together")
        return self

    def dtype_of(self, name: str) -> str:
        """Arithmetic of the model called ``name``: its own entry of ``dtype``, else the last that names no model."""
        chosen = "float32"
        for word in self.dtype:
            model, _, dtype = word.rpartition("=")
            if model == name:
                return dtype
            if not model:
                chosen = dtype
        return chosen

    @property
    def max_body(self) -> int:
        """Largest request body, bytes."""
        return int(self.max_body_mb * 1e6)

    @field_validator("frame_socket", mode="before")
    @classmethod
    def _place_of_frames(cls, value: Any) -> Any:
        """A port may be written as a number."""
        text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if isinstance(text, str) and text.isdigit() and int(text) > 65535:
            raise ValueError("a port is a number from 0 to 65535, and anything else the path of a unix socket")
        return text

    @property
    def frame_address(self) -> int | Path | None:
        """Where frames are spoken: a port, a unix socket, or nowhere."""
        if self.frame_socket is None:
            return None
        return int(self.frame_socket) if self.frame_socket.isdigit() else Path(self.frame_socket)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect: a unix socket or a loopback address."""
        on_host = self.uds is None or isinstance(self.frame_address, int)
        if not on_host or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


FIELDS = tuple(Settings.model_fields)


@dataclass(frozen=True)
class Loaded:
    """Settings and where each came from (``origins``, by field name), with remarks to log at start."""

    settings: Settings
    origins: Mapping[str, str]
    remarks: tuple[str, ...] = field(default=())


def load(flags: Mapping[str, Any], config: Path | None = None) -> Loaded:
    """Put settings together.

    Args:
        flags: Values by field name, of those flags that were given.
        config: The TOML file; left out, the one that ``NEPSERVE_CONFIG`` names, if any.

    Raises:
        SettingsError: A value or name that cannot be used, and where it stands.
    """
    if config is None and os.environ.get(f"{PREFIX}CONFIG"):
        config = Path(os.environ[f"{PREFIX}CONFIG"])
    values: dict[str, Any] = {}
    origins = dict.fromkeys(FIELDS, "default")
    if config is not None:
        for name, value in _from_file(config).items():
            values[name], origins[name] = value, str(config)
    variables, remarks = _from_environment()
    for name, value in variables.items():
        values[name], origins[name] = value, PREFIX + name.upper()
    for name, value in flags.items():
        values[name], origins[name] = value, flag_of(name)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(e, origins) for e in error.errors())) from None
    return Loaded(settings, origins, remarks)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return "MODEL" if name == "models" else "--" + name.replace("_", "-")


def show(loaded: Loaded) -> str:
    """The settings as a TOML file whose comments say where each value came from; secrets are left out."""
    lines = []
    for name in FIELDS:
        value = getattr(loaded.settings, name)
        origin = loaded.origins[name]
        if name == "api_keys" and value:
            lines.append(f"# api_keys: {len(value)} given, not shown ({origin})")
        elif value is None:
            lines.append(f"# {name} is not set")
        else:
            text = f"{name} = {_toml(value)}"
            lines.append(f"{text:<44}# {origin}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _from_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingsError(f"{path}: no such settings file")
    try:
        values = dict(TomlConfigSettingsSource(Settings, toml_file=path)())
    except (ValueError, OSError) as error:
        raise SettingsError(f"{path}: {error}") from None
    for name in values:
        if name not in FIELDS:
            raise SettingsError(f"{path}: there is no setting {name!r}{_nearest(name)}")
    return values


def _from_environment() -> tuple[dict[str, Any], tuple[str, ...]]:
    values = dict(EnvSettingsSource(Settings)())
    remarks = []
    if str(values.get("port", "")).startswith("tcp://"):
        del values["port"]
        remarks.append(f"{PREFIX}PORT is a Kubernetes service link, not a port; it is ignored")
    for variable in sorted(os.environ):
        name = variable.removeprefix(PREFIX).lower()
        if not variable.startswith(PREFIX) or name in FIELDS or name in _NOT_OF_SERVE:
            continue
        if not variable.endswith(_SERVICE_LINK_SUFFIXES) and "_PORT_" not in variable:
            remarks.append(f"{variable} is no setting{_nearest(name)}; it is ignored")
    return values, tuple(remarks)


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, FIELDS, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _explain(error: Any, origins: Mapping[str, str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    reason = error["msg"].removeprefix("Value error, ")
    if not name:
        return str(reason)
    origin = origins.get(name, "default")
    where = origin if origin in {flag_of(name), PREFIX + name.upper()} else f"{origin}: {name}"
    found = "" if name == "api_keys" else f" (found {error['input']!r})"
    return f"{where}: {reason[:1].lower()}{reason[1:]}{found}"
