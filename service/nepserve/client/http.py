"""The synchronous client."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from nepcore.structures import DEFAULT_PROPERTIES, Predictions

from . import answers, bodies
from .connection import first_ready
from .errors import ConnectionFailed, NepserveError, StructureRejected, Timeout
from .exchange import Exchange
from .options import check_dtype, check_key, check_priority, check_timeout
from .replicas import Replicas
from .retry import Retry
from .ways import parse_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    from typing_extensions import Self

    from nepcore.structures import Prediction, Structures

    from .bodies import OnError, StructureLike
    from .exchange import Call
    from .replicas import Replica, Servers

IN_FLIGHT = 3
"""Bodies of one ``evaluate_many`` under way together at each server: one on the device, one in the queue, one on the
road."""

ONCE = Retry(limit=0)


class Client:
    """A client of one server, or of several that serve the same, for any number of threads.

    With several, a request goes to the one with the fewest queued atoms. One that cannot be reached, is not ready or
    has no room passes the request on to the next, at once and without loss, and is left alone for a while.

    Connections are kept and shared; one that the server closed meanwhile is replaced without notice. The client can be
    pickled (its connections stay behind, its key goes along) and used on after a fork.

    Attributes:
        url: Address of the server as it was given; of several with commas between, of a file as ``file:PATH``.
        model_name: Model asked for where a call names none; None for the server's only one.
        timeout: Seconds for one request, repetitions and waits included. It travels with the request, and the server
            drops work whose time is over.
        retries: When a failed attempt is repeated.
        dtype: Type of positions on the way out and of per-atom arrays in results, ``float64`` or ``float32``.
            Energies and stresses are float64 always.
        exchange: The way to the server, for the parts of this package.
        place: How steps travel, taken apart.
        sessions: False once the server was found not to know sessions.
        priority: ``interactive``, ``bulk`` or None (the server's rule; ``bulk`` where an ``evaluate_many`` takes more
            than one body).
    """

    def __init__(
        self,
        url: Servers | Sequence[str],
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 60.0,
        retries: Retry | int = Retry(),  # noqa: B008 - frozen
        dtype: str = "float64",
        priority: str | None = None,
        verify: bool | str | os.PathLike[str] = True,
        steps: str | None = None,
    ) -> None:
        """Prepare a client; nothing is sent yet.

        Args:
            url: ``http://host:port``, ``https://host`` (with a path in front of the routes if there is one), or
                ``unix:///path`` for the server's unix socket. Several of them, as a list or with commas between; or
                a file that names them, one a line, as a path or as ``file:PATH``: it is read again when it changes.
            model: Name of the model; None for the server's only one.
            api_key: Sent as ``Authorization: Bearer``.
            timeout: See the attribute.
            retries: A :class:`Retry`, or how often a failed attempt is repeated at most.
            dtype: See the attribute.
            priority: See the attribute.
            verify: For https: True checks the certificate against the system's authorities, a path names a file of
                other ones, False checks nothing.
            steps: How the steps of simulations travel: ``http`` (the default), ``websocket``, or the address of the
                server's frame socket, ``frames://host:port`` or ``frames:///path``. Everything else is HTTP.

        Raises:
            ValueError: An argument that cannot be used.
        """
        replicas = Replicas(url)
        self.url = replicas.text
        self.model_name = model
        self.timeout = check_timeout(timeout)
        self.retries = Retry(limit=retries) if isinstance(retries, int) else retries
        self.dtype = check_dtype(dtype)
        self.priority = check_priority(priority)
        trust = verify if isinstance(verify, bool) else os.fspath(verify)
        self.exchange = Exchange(replicas, check_key(api_key), trust)
        self.place = parse_steps(steps)
        self.sessions = True

    def __repr__(self) -> str:
        model = "" if self.model_name is None else f", model={self.model_name!r}"
        return f"{type(self).__name__}({self.url!r}{model})"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections that are idle. A later call opens a new one."""
        self.exchange.close()

    def evaluate(
        self,
        structure: StructureLike | Structures,
        properties: Iterable[str] = DEFAULT_PROPERTIES,
        *,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Prediction:
        """Evaluate one structure.

        Args:
            structure: ASE ``Atoms`` (``info["temperature"]`` is the temperature of temperature models), a
                :class:`nepcore.Structure`, or a mapping with ``numbers`` or ``symbols``, ``positions`` (Å), and
                optionally ``cell`` (rows, Å), ``pbc``, ``temperature`` (K).
            properties: Names out of ``energy`` (eV), ``free_energy`` (the same), ``energies`` (N,), ``forces``
                (N, 3) eV/Å, ``stress`` (6,) eV/Å³ with tension positive, xx yy zz yz xz xy, ``virial`` (3, 3) and
                ``virials`` (N, 3, 3) eV, ``descriptors`` (N, D).
            model: Name of a model other than the client's.
            timeout: Seconds, other than the client's.

        Returns:
            The values by name, complete; ``result["forces"]`` is a fresh array. A property that cannot exist (the
            stress of a structure that is not periodic in three directions) is named in ``result.unavailable``.

        Raises:
            StructureRejected: The model cannot evaluate the structure.
            NepserveError: No complete answer came, for the reason that the error's class and text give.
        """
        names = bodies.check_properties(properties)
        block = bodies.gather_one(structure)
        body = bodies.request_body(block, names, model or self.model_name, self.dtype, single=True)
        call = self._post(body, self.priority, timeout, block.n_atoms)
        answer = self.exchange.finish(call)
        found = answers.read_answer(answer, block, names, url=call.url, request_id=call.request_id)
        return answers.one_result(found, names, url=call.url, request_id=call.request_id)

    def evaluate_many(
        self,
        structures: Structures | Iterable[StructureLike],
        properties: Iterable[str] = DEFAULT_PROPERTIES,
        *,
        chunk_atoms: int = 65_536,
        on_error: OnError = "raise",
        progress: Callable[[int, int], None] | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> Predictions:
        """Evaluate any number of structures of any size, in bodies of bounded size, several under way at a time.

        Args:
            structures: As in :meth:`evaluate`, or one packed :class:`nepcore.Structures`.
            properties: As in :meth:`evaluate`.
            chunk_atoms: Atoms in one body at most; bodies start small and grow as the server's speed allows. A larger
                structure travels alone.
            on_error: ``raise`` stops at the first structure that cannot be evaluated; ``return`` goes on, and leaves
                it in ``result.errors`` with its rows NaN. What is not one structure's fault is raised in either case.
            progress: Called with (structures done, structures in all) after every body.
            model: Name of a model other than the client's.
            timeout: Seconds for one body, other than the client's.

        Returns:
            Packed results in the order of ``structures``: ``result["energy"]`` is (B,), ``result["forces"]`` is
            (N, 3) with the structures end to end, ``result.view(i)`` is the result of one.

        Raises:
            StructureRejected: With ``on_error="raise"``; its ``index`` is that of the structure.
            NepserveError: No complete answer came for some body; its ``structures`` says for which.
        """
        names = bodies.check_properties(properties)
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        pace = bodies.Pace(chunk_atoms, seconds)
        work = bodies.gather(structures)
        answers.raise_first(work.rejected, bodies.check_on_error(on_error), self.url)
        run = _Run(self, self.exchange, work, names, on_error, model or self.model_name, seconds, pace)
        return bodies.join(work, run.results(progress), names, self.dtype)

    def models(self) -> list[dict[str, Any]]:
        """What the server serves: for each model its name, elements, cutoffs and limits."""
        return answers.read_models(self._get("/v1/models"), url=self.url)

    def model(self, name: str | None = None) -> dict[str, Any]:
        """What one model is; ``name`` left out means the client's own."""
        found: dict[str, Any] = self._get(answers.model_path(name or self.model_name))
        return found

    def status(self) -> dict[str, Any]:
        """Queue, speed and limits of the server; of several, of one of them."""
        found: dict[str, Any] = self._get("/v1/status")
        return found

    def replicas(self) -> list[dict[str, Any]]:
        """What is known of each server: ``url``, ``load`` (atoms under way or queued there, as far as this client
        knows), and ``rests`` (s) of one that failed and is left alone meanwhile.
        """
        now = time.monotonic()
        self.exchange.replicas.refresh(now)
        return self.exchange.replicas.describe(now)

    def version(self) -> dict[str, Any]:
        """Versions of the server and of what it runs on."""
        found: dict[str, Any] = self._get("/v1/version")
        return found

    def ready(self, timeout: float = 5.0) -> bool:
        """Whether the server (of several, any of them) can evaluate now; False also if nothing answers there."""
        try:
            return self._not_ready(check_timeout(timeout)) is None
        except (ConnectionFailed, Timeout):
            return False

    def wait_until_ready(self, timeout: float = 60.0) -> None:
        """Wait for a server that starts, or that is not there yet; of several, for the first of them.

        Raises:
            Timeout: It was not ready in ``timeout`` seconds; the text says what it answered last.
            ServerError: What answers is not nepserve, or wants another key.
        """
        ends = time.monotonic() + check_timeout(timeout)
        for pause in answers.pauses():
            try:
                reason = self._not_ready(min(max(ends - time.monotonic(), 0.05), 5.0))
            except (ConnectionFailed, Timeout) as error:
                reason = str(error)
            if reason is None:
                return
            if time.monotonic() + pause >= ends:
                raise Timeout(f"{self.url} was not ready within {timeout:g} s: {reason}", url=self.url, seconds=timeout)
            time.sleep(pause)

    def _not_ready(self, timeout: float) -> str | None:
        """Why no server is ready; None if one is."""
        replicas = self.exchange.replicas
        replicas.refresh(time.monotonic())
        if not replicas.several:
            return self._one_not_ready(None, timeout)
        reasons = []
        for replica in replicas.members:
            try:
                reason = self._one_not_ready(replica, timeout)
            except (ConnectionFailed, Timeout) as error:
                reason = str(error)
            if reason is None:
                return None
            reasons.append(reason)
        return "; ".join(reasons) or str(replicas.nowhere())

    def _one_not_ready(self, replica: Replica | None, timeout: float) -> str | None:
        call = self.exchange.call("GET", "/readyz", {}, b"", timeout=timeout, retries=ONCE, to=replica)
        answer = self.exchange.finish(call, any_status=True)
        return answers.not_ready(answer, url=call.url)

    def _get(self, path: str) -> Any:
        headers = {"Accept": "application/json"}
        call = self.exchange.call("GET", path, headers, b"", timeout=self.timeout, retries=self.retries)
        answer = self.exchange.finish(call)
        return answers.read_json(answer, url=call.url, path=path)

    def _post(self, body: bytes, priority: str | None, timeout: float | None, atoms: int) -> Call:
        seconds = self.timeout if timeout is None else check_timeout(timeout)
        return self.exchange.call(
            "POST", "/v1/evaluate", answers.post_headers(priority), body, timeout=seconds, retries=self.retries,
            atoms=atoms,
        )  # fmt: skip


class _Run:
    """The bodies of one ``evaluate_many``.

    Several are under way together without any thread: a body is sent, on a connection of its own, before the answer
    to an earlier one is read. So an interrupt ends it all at once. With one server, errors come in the order of the
    structures; with several, answers are taken as they come, so that a slow one does not hold up the others.
    """

    def __init__(
        self,
        client: Client,
        exchange: Exchange,
        work: bodies.Work,
        names: Sequence[str],
        on_error: OnError,
        model: str | None,
        timeout: float,
        pace: bodies.Pace,
    ) -> None:
        self.exchange = exchange
        self._client = client
        self._work = work
        self._names = names
        self._on_error = on_error
        self._model = model
        self._timeout = timeout
        self._pace = pace
        self._priority = bodies.many_priority(client.priority, pace, work)

    def results(self, progress: Callable[[int, int], None] | None) -> list[Predictions]:
        """The results of all bodies, in order."""
        offsets, B = self._work.structures.offsets, len(self._work.structures)
        done: dict[int, list[Predictions]] = {}
        finished = len(self._work.rejected)
        under_way: deque[tuple[int, int, Call]] = deque()
        replicas = self.exchange.replicas
        start = 0
        try:
            while start < B or under_way:
                while start < B and len(under_way) < IN_FLIGHT * max(len(replicas), 1):
                    stop = self._pace.stop(offsets, start)
                    under_way.append((start, stop, self._sent(start, stop)))
                    start = stop
                if len(replicas) > 1:
                    under_way.rotate(-first_ready([call.connection for _, _, call in under_way]))
                first, last, call = under_way.popleft()
                done[first] = self._received(first, last, call)
                finished += last - first
                if progress is not None:
                    progress(finished, len(self._work.counts))
        finally:
            for _, _, call in under_way:
                call.abandon()
        return [part for first in sorted(done) for part in done[first]]

    def _sent(self, start: int, stop: int) -> Call:
        block = self._work.structures.slice(start, stop)
        body = bodies.request_body(block, self._names, self._model, self._client.dtype)
        call = self.exchange.call(
            "POST", "/v1/evaluate", answers.post_headers(self._priority), body, timeout=self._timeout,
            retries=self._client.retries, atoms=block.n_atoms,
        )  # fmt: skip
        self.exchange.begin(call)
        return call

    def _received(self, start: int, stop: int, call: Call) -> list[Predictions]:
        """Results of structures ``start`` to ``stop`` − 1; in pieces if the body had to be cut."""
        block = self._work.structures.slice(start, stop)
        request_id = call.request_id
        try:
            # While earlier answers were read and handed on, this one may have been waiting at the door.
            answer = self.exchange.finish(call, grace=1.0)
            found = answers.read_answer(answer, block, self._names, url=call.url, request_id=request_id)
        except NepserveError as error:
            if bodies.cuts(error, stop - start):
                middle = (start + stop) // 2
                return [
                    piece
                    for a, b in ((start, middle), (middle, stop))
                    for piece in self._received(a, b, self._sent(a, b))
                ]
            if not isinstance(error, StructureRejected):
                raise error.concerning(self._work.span(start, stop)) from None
            if self._on_error == "raise":
                raise error.at(self._work.index(start)) from None
            return [bodies.failed_block(block, self._names, self._client.dtype, error)]
        self._pace.note(block.n_atoms, time.monotonic() - call.attempts.started)
        errors = {self._work.index(start + i): error for i, error in found.errors.items()}
        answers.raise_first(errors, self._on_error, call.url, request_id)
        return [found]
