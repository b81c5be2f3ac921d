"""What is taken from an answer, and what makes it invalid. For both clients.

An answer is used whole or not at all: a force array that is short, of another structure or not finite must stop the
simulation that asked for it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from nepcore.structures import PER_ATOM, PER_STRUCTURE, Prediction, Predictions, Structures
from nepserve.wire.msgpack_format import CONTENT_TYPE, unpack_result

from .errors import InvalidAnswer, StructureRejected, from_answer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from nepcore.errors import StructureError

    from .bodies import OnError
    from .connection import Answer


def read_answer(
    answer: Answer, structures: Structures, properties: Sequence[str], *, url: str, request_id: str | None
) -> Predictions:
    """The results in a successful answer, checked whole.

    Raises:
        InvalidAnswer: Content type, lengths or counts are wrong, a property is missing, or a number of a structure
            that did not fail is not finite.
    """

    def invalid(what: str) -> InvalidAnswer:
        told = answer.headers.get("x-request-id") or request_id
        return InvalidAnswer(
            f"{url} answered, but {what}. Nothing of the answer is used (request id {told}).", url=url, request_id=told
        )

    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != CONTENT_TYPE:
        page = bytes(answer.body[:80])
        raise invalid(f"with {kind or 'no content type'} instead of {CONTENT_TYPE}: {page!r}. Is it nepserve?")
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise invalid(f"with content encoding {coding}, which was not asked for")
    try:
        found = unpack_result(bytes(answer.body), structures.counts)
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise invalid(f"not with the results asked for: {error}") from error
    fault = _fault(found, structures, properties)
    if fault:
        raise invalid(fault)
    return found


def _fault(found: Predictions, structures: Structures, properties: Sequence[str]) -> str | None:
    """What is wrong with the shape or the numbers of a result; None if nothing is."""
    B, N = len(structures), structures.n_atoms
    if len(found) != B or not np.array_equal(found.counts, structures.counts):
        return f"with results of {len(found)} structures, {int(found.counts.sum())} atoms, instead of {B} and {N}"
    failed = np.zeros(B, bool)
    failed[list(found.errors)] = True
    for name in properties:
        array = found.values.get(name)
        if array is None:
            # A property that no structure of the body can have may be left out as a whole.
            if name == "stress" and not (found.stress_known & ~failed).any():
                continue
            return f"without {name}"
        entry = PER_STRUCTURE.get(name) or PER_ATOM.get(name) or ()
        rows = N if name in PER_ATOM else B
        wanted = (rows, *(array.shape[k + 1] if n is None and array.ndim > k + 1 else n for k, n in enumerate(entry)))
        if array.shape != wanted:
            return f"with {name} of shape {array.shape} instead of {wanted}"
        if np.isfinite(array).all():
            continue
        ok = ~failed & found.stress_known if name == "stress" else ~failed
        rows_ok = np.repeat(ok, structures.counts) if name in PER_ATOM else ok
        finite = np.isfinite(array.reshape(rows, -1)).all(axis=1)
        bad = np.flatnonzero(rows_ok & ~finite)
        if len(bad):
            row = int(bad[0])
            if name not in PER_ATOM:
                return f"with {name} of structure {row + 1} not finite"
            i = int(np.searchsorted(structures.offsets, row, side="right")) - 1
            return f"with {name} of atom {row - int(structures.offsets[i]) + 1} of structure {i + 1} not finite"
    return None


def one_result(found: Predictions, properties: Sequence[str], *, url: str, request_id: str | None) -> Prediction:
    """The only result of a block of one; its arrays belong to nobody else.

    Raises:
        StructureRejected: The structure could not be evaluated.
    """
    if found.errors:
        raise StructureRejected.of(found.errors[0], url=url, request_id=request_id)
    given = found.view(0).values
    values = {name: given[name] for name in properties if name in given}
    return Prediction(values, tuple(name for name in properties if name not in values))


def raise_first(
    errors: Mapping[int, StructureError], on_error: OnError, url: str, request_id: str | None = None
) -> None:
    """Raise the first of the structures that failed, by its index in the call, if failures are to be raised."""
    if errors and on_error == "raise":
        index = min(errors)
        raise StructureRejected.of(errors[index], index=index, url=url, request_id=request_id)


def read_json(answer: Answer, *, url: str, path: str) -> Any:
    """The JSON document of a successful answer."""
    kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidAnswer(
            f"{url}{path} answered with {kind or 'no content type'} instead of application/json: "
            f"{bytes(answer.body[:80])!r}. Is it nepserve?", url=url,
        )  # fmt: skip
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise InvalidAnswer(f"{url}{path} answered with broken JSON: {error}", url=url) from error


def read_models(document: Any, *, url: str) -> list[dict[str, Any]]:
    """The list of models in the answer of ``/v1/models``."""
    found = document.get("models") if isinstance(document, dict) else document
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise InvalidAnswer(f"{url}/v1/models answered without a list of models", url=url)
    return found


def post_headers(priority: str | None) -> dict[str, str]:
    """Headers of an evaluation."""
    headers = {"Content-Type": CONTENT_TYPE, "Accept": CONTENT_TYPE}
    return headers if priority is None else {**headers, "X-Priority": priority}


def pauses() -> Iterator[float]:
    """Waits between two looks at a server that starts, s."""
    pause = 0.02
    while True:
        yield pause
        pause = min(pause * 1.5, 1.0)


def model_path(name: str | None) -> str:
    """Route of one model."""
    if not name:
        raise ValueError("which model? Give its name, or a model to the client")
    return f"/v1/models/{quote(name, safe='')}"


def not_ready(answer: Answer, *, url: str) -> str | None:
    """Why a server is not ready, from its answer to ``/readyz``; None if it is.

    Raises:
        ServerError: It is not a server that becomes ready.
    """
    if answer.status == 200:
        return None
    error = from_answer(answer.status, answer.headers, bytes(answer.body), url=url, path="/readyz", request_id=None)
    # A proxy says 502 while the server behind it starts.
    if answer.status not in {429, 502, 503, 504}:
        raise error
    return str(error)
