"""What the routes answer besides results, as the API document shows it. What is not known is left out."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Problem(BaseModel):
    """An error (RFC 9457). Programs look at `code`, and at the members beside it that the code announces."""

    model_config = ConfigDict(extra="allow")

    type: str = Field(description="A URN of the code.", examples=["urn:nepserve:problem:non_finite"])
    title: str = Field(description="What the code means.")
    status: int = Field(description="HTTP status.")
    code: str = Field(description="A stable word, one for each fault.", examples=["non_finite"])
    detail: str = Field(description="What is wrong this time; counts structures and atoms from 1.")
    request_id: str = Field(description="Value of X-Request-Id, to be found in the server's log.")
    field: str | None = Field(None, description="The field at fault.")
    structure: int | None = Field(None, description="Index of the structure, from 0.")
    atoms: list[int] | None = Field(None, description="Indices of the atoms, from 0.")
    retry_after: float | None = Field(None, description="Seconds after which to ask again.")
    max_atoms: int | None = Field(None, description="Atoms of the largest structure, or request, that is taken.")


class Model(BaseModel):
    """A served model."""

    model_config = ConfigDict(extra="allow")

    name: str
    aliases: list[str] = Field(description="Other names that requests may use.")
    origin: str = Field(description="File it was loaded from; `bundled` for the one that comes with the package.")
    sha256: str = Field(description="Digest of that file.")
    dtype: Literal["float32", "float64"] = Field(description="Arithmetic of descriptors, networks and forces.")
    elements: list[str] = Field(description="Chemical elements it knows, in its own order.")
    temperature: bool = Field(description="Whether structures must say their temperature.")
    cutoff: float = Field(description="Largest cutoff, Å.")
    max_atoms: int = Field(description="Atoms of the largest structure that is taken.")
    loaded_at: float = Field(description="When it was ready, seconds since 1970.")
    backend: str | None = Field(None, description="How its physics is computed.")
    device: str | None = Field(None, description="Where it is computed.")
    file: dict[str, Any] = Field(description="What its file says: version, cutoffs, sizes, ZBL ...")
    about: dict[str, Any] | None = Field(None, description="Of the bundled model: its purpose, data and errors.")


class Models(BaseModel):
    """The served models."""

    models: list[Model]
    aliases: dict[str, str] = Field(description="Model by alias.")
    default: str | None = Field(None, description="Model of requests that name none.")


class Version(BaseModel):
    """What runs here."""

    name: str
    version: str
    api: str
    python: str
    torch: str | None = Field(None, description="Left out until the engine has started.")


class Live(BaseModel):
    """The process answers; nothing is said of the device."""

    status: Literal["alive"]
    uptime: float = Field(description="Seconds since the start.")


class Ready(BaseModel):
    """Every model is warm, and a known answer was computed lately."""

    status: Literal["ready"]
    models: list[str]


class Queue(BaseModel):
    """What waits for the device."""

    requests: int
    atoms: int
    max_requests: int
    max_atoms: int


class Status(BaseModel):
    """State of the server, for people and dashboards."""

    model_config = ConfigDict(extra="allow")

    ready: bool
    reason: str | None = Field(None, description="Why it is not ready.")
    draining: bool
    uptime: float = Field(description="Seconds since the start.")
    queue: Queue
    limits: dict[str, Any] = Field(description="What one request may carry.")
    device_seconds: float = Field(description="Time that batches took on the device, or devices, since the start.")
    engine: dict[str, Any] = Field(description="Process, device, memory, restarts.")
    models: list[str]
    backends: dict[str, dict[str, Any]] = Field(
        description="By model: the way its physics is computed, how it was chosen, and what was measured."
    )
    fronts: list[dict[str, Any]] | None = Field(
        None, description="The processes of --fronts: ready, pid, connections; left out where there is one."
    )
    work_per_second: dict[str, float] = Field(
        description="Measured speed by model, in atoms × (neighbours + 16); left out for one that was never asked."
    )


class Load(BaseModel):
    """A model to load from the model directory."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(description="Name to serve it under; one that is served is replaced once the new one is warm.")
    path: str = Field(description="File, relative to the model directory.")
    dtype: Literal["float32", "float64"] | None = Field(None, description="Left out: as the server was started.")


class Alias(BaseModel):
    """What an alias stands for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str = Field(description="Name of a served model.")


class Aliases(BaseModel):
    """All aliases."""

    aliases: dict[str, str] = Field(description="Model by alias.")


class Drained(BaseModel):
    """What is still in flight."""

    status: Literal["draining", "drained"]
    requests: int
