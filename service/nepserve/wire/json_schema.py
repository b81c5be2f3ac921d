"""The JSON form as models, for the API document and for clients that generate code. The server does not parse by them.

:mod:`nepserve.wire.json_format` reads the same requests with NumPy, many times as fast. A test holds the two to the
same keys and to the same examples.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.json_schema import models_json_schema

from nepcore.elements import MAX_NUMBER

from .negotiation import CONTENT_TYPES
from .request import MAX_NAME

Vector = Annotated[list[float], Field(min_length=3, max_length=3)]
Matrix = Annotated[list[Vector], Field(min_length=3, max_length=3)]
Property = Literal["energy", "free_energy", "stress", "virial", "energies", "forces", "virials", "descriptors"]
ModelName = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]

SILICON: dict[str, Any] = {
    "numbers": [14, 14],
    "positions": [[0.0, 0.0, 0.0], [1.36, 1.36, 1.36]],
    "cell": [[0.0, 2.72, 2.72], [2.72, 0.0, 2.72], [2.72, 2.72, 0.0]],
    "pbc": [True, True, True],
}
"""Two atoms of silicon, the example of the documentation."""


class AtomicStructure(BaseModel):
    """One structure. Besides, `as_dict()` of pymatgen's Structure and Molecule, an OPTIMADE structure resource and a
    QCSchema molecule are taken as they are.
    """

    model_config = ConfigDict(extra="forbid", title="Structure", json_schema_extra={"examples": [SILICON]})

    numbers: list[Annotated[int, Field(ge=1, le=MAX_NUMBER)]] | None = Field(
        None, description="Atomic numbers, one for each atom. Either these or `symbols`."
    )
    symbols: list[str] | None = Field(None, description="Chemical symbols, exactly spelt, one for each atom.")
    positions: list[Vector] = Field(description="Å, one row for each atom; atoms may lie outside the cell.")
    cell: Matrix | Vector | None = Field(
        None, description="Å, three vectors as rows, or the three edges of an orthorhombic cell. None: a molecule."
    )
    pbc: Annotated[list[bool], Field(min_length=3, max_length=3)] | bool | None = Field(
        None, description="Periodic directions. Left out: all if there is a cell, else none; the answer says which."
    )
    temperature: float | None = Field(None, ge=0, description="K, for models that depend on it.")


class EvaluateRequest(BaseModel):
    """What to compute: one `structure`, or several `structures`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"structure": SILICON, "properties": ["energy", "forces", "stress"]}]},
    )

    model: ModelName | None = Field(None, description="Name of the model; may be left out if there is only one.")
    properties: Annotated[list[Property], Field(min_length=1)] | None = Field(
        None, description="What to compute; energy, forces and stress if left out."
    )
    structure: AtomicStructure | None = Field(None, description="One structure; the answer is one result.")
    structures: list[AtomicStructure] | None = Field(None, description="Several; the answer has `results` in order.")


class Failure(BaseModel):
    """Why one structure of several has no result. The others are not affected."""

    code: str = Field(description="A stable word, one for each fault.", examples=["non_finite"])
    message: str = Field(description="What is wrong; counts atoms from 1.")
    field: str | None = Field(None, description="The key at fault.")
    atoms: list[int] | None = Field(None, description="Indices of the atoms, from 0.")


class Result(BaseModel):
    """Results of one structure: the properties asked for, or `error`. Never NaN, never zero for what is not known."""

    error: Failure | None = Field(None, description="Instead of all else, for a structure that failed.")
    energy: float | None = Field(None, description="eV.")
    free_energy: float | None = Field(None, description="eV; the same number as energy.")
    forces: list[Vector] | None = Field(None, description="eV/Å, one row for each atom.")
    stress: Annotated[list[float], Field(min_length=6, max_length=6)] | None = Field(
        None,
        description="eV/Å³, (1/V) ∂E/∂ε, tension positive: xx yy zz yz xz xy. Only if periodic in all directions.",
    )
    virial: Matrix | None = Field(None, description="eV, −∂E/∂ε, 3 × 3.")
    energies: list[float] | None = Field(None, description="eV, one for each atom; their sum is the energy.")
    virials: list[Matrix] | None = Field(
        None,
        description="eV, 3 × 3 for each atom, row r, column gradient, booked on the neighbour; sum to the virial.",
    )
    descriptors: list[list[float]] | None = Field(None, description="The model's descriptors of each atom.")
    unavailable: list[Property] | None = Field(
        None, description="Properties that were asked for and that this structure cannot have; left out if none."
    )
    pbc: list[bool] | None = Field(None, description="Periodic directions used, if the request did not say.")


class EvaluateAnswer(Result):
    """Answer to one `structure`: its result, with the name of the model."""

    model: str | None = Field(None, description="Name of the model that answered.")


class EvaluateAnswers(BaseModel):
    """Answer to `structures`: status 200 once the request itself is right, whatever became of single structures."""

    model: str | None = Field(None, description="Name of the model that answered.")
    results: list[Result] = Field(description="One result for each structure, in order.")


def operation() -> tuple[dict[str, Any], dict[str, Any]]:
    """``POST /v1/evaluate`` for an OpenAPI document.

    Returns:
        ``requestBody`` and the answer with status 200, as members of an operation object; and the schemas they refer
        to, by name, for ``components/schemas``.
    """
    models = [(m, "validation") for m in (EvaluateRequest, EvaluateAnswer, EvaluateAnswers)]
    refs, whole = models_json_schema(models, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    request, one, many = (refs[key] for key in models)  # type: ignore[index]
    binary = {
        CONTENT_TYPES["msgpack"]: {"schema": {"type": "string", "format": "binary"}},
        CONTENT_TYPES["xyz"]: {"schema": {"type": "string"}},
        CONTENT_TYPES["npz"]: {"schema": {"type": "string", "format": "binary"}},
    }
    described = {
        "requestBody": {
            "required": True,
            "description": "The format is that of Content-Type; each of them is described in the documentation.",
            "content": {CONTENT_TYPES["json"]: {"schema": request}, **binary},
        },
        "responses": {
            "200": {
                "description": "Results, in the format of Accept, or else in that of the request.",
                "content": {CONTENT_TYPES["json"]: {"schema": {"anyOf": [one, many]}}, **binary},
            }
        },
    }
    return described, whole.get("$defs", {})
