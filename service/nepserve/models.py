"""The models of a server: names, aliases, versions, and the private copy each version is loaded from.

A name points to one version. Loading a file under a name that is taken makes a new version; once it is warm the name
points to it, requests that hold the old one finish with it, and then the engine forgets the old one.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import tempfile
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nepcore import bundled
from nepcore.errors import ModelFileError
from nepcore.files import nep_txt

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from nepcore.admission import Admission
    from nepcore.files.nep_txt import NepFile

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._+-]{0,62}[A-Za-z0-9+])?")
FOLDER_FILES = ("nep.txt", "nep_best.txt")
"""Files that are looked for where a folder is given as a model."""


class ModelNameError(ValueError):
    """A name that no model can have, or that two models want."""


class UnknownModelError(LookupError):
    """No model of this name is served; ``served`` are those that are."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        self.name = name
        self.served = tuple(served)
        known = ", ".join(self.served) or "none"
        super().__init__(f"There is no model {name!r} here; served: {known}.")


class ModelNotGivenError(LookupError):
    """A request named no model, and none is the obvious one."""

    def __init__(self, served: Sequence[str]) -> None:
        self.served = tuple(served)
        known = ", ".join(self.served)
        super().__init__(f"Say which model: {known}." if known else "No model is served yet.")


class Copy:
    """A private copy of a model file: it stays what it is when the file on disk is trained on, replaced or removed.

    It lives in memory that the engine process opens through ``/proc``, so that nothing is left behind however the
    server ends; where there is no such memory, in a temporary file.
    """

    def __init__(self, content: bytes) -> None:
        self._open, self._fd = True, -1
        if hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir():
            self._fd = os.memfd_create("nep.txt", os.MFD_CLOEXEC)
            with open(self._fd, "wb", closefd=False) as file:
                file.write(content)
            self.path = Path(f"/proc/{os.getpid()}/fd/{self._fd}")
        else:
            fd, name = tempfile.mkstemp(prefix="nepserve-", suffix=".txt")
            with open(fd, "wb") as file:
                file.write(content)
            self.path = Path(name)

    def close(self) -> None:
        """Give the memory, or the file, back; once is enough, and more does nothing."""
        if self._open and self._fd >= 0:
            os.close(self._fd)
        elif self._open:
            self.path.unlink(missing_ok=True)
        self._open = False


class CopyElsewhere(Copy):
    """A copy that another process keeps: its place, and nothing to give back."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def close(self) -> None:
        """Leave it to its owner."""


@dataclass(frozen=True, eq=False)
class Source:
    """A model file that was read and found good.

    Attributes:
        name: The name it is to be served under.
        origin: The file it came from, for people; ``bundled`` for the model that comes with the package.
        file: What it says.
        sha256: Hexadecimal digest of the file's bytes.
        copy: The private copy the engine loads.
    """

    name: str
    origin: str
    file: NepFile
    sha256: str
    copy: Copy

    @classmethod
    def from_bytes(cls, name: str, origin: str, content: bytes) -> Source:
        """Check the content of a model file.

        Raises:
            ModelFileError: It is no model that can be served; the error names ``origin`` and the line.
        """
        copy = Copy(content)
        try:
            file = nep_txt.read(copy.path)
        except ModelFileError as error:
            copy.close()
            raise ModelFileError(origin, error.line, error.reason) from None
        return cls(name, origin, file, sha256(content).hexdigest(), copy)


def read_model(name: str, path: Path) -> Source:
    """Read a model file, or the model file of a folder.

    Raises:
        ModelFileError: There is no such file, or it is no model that can be served.
    """
    found = locate(path)
    try:
        with found.open("rb") as file:
            # One byte more, for the reader to find it too large.
            content = file.read(nep_txt.MAX_BYTES + 1)
    except OSError as error:
        raise ModelFileError(found, None, f"cannot be read: {error.strerror}") from None
    return Source.from_bytes(name, str(found), content)


def demo_model() -> Source:
    """The small model that comes with the package, of seven metals: a demonstration."""
    return Source.from_bytes(bundled.NAME, "bundled", bundled.content())


def locate(path: Path) -> Path:
    """The model file that a path stands for: itself, or the model file in a folder.

    Raises:
        ModelFileError: A folder without a model file.
    """
    if not path.is_dir():
        return path
    for name in FOLDER_FILES:
        if (path / name).is_file():
            return path / name
    raise ModelFileError(path, None, f"this folder has no {' or '.join(FOLDER_FILES)}")


def parse_models(words: Sequence[str]) -> dict[str, Path]:
    """Names and paths of models given as ``[name=]PATH``.

    The name left out is the file's stem; for a folder it is the folder's name.

    Raises:
        ModelNameError: A name that cannot be, or one that two models share.
    """
    models: dict[str, Path] = {}
    for word in words:
        name, separator, rest = word.partition("=")
        # A path may contain "=" itself; then what stands before it is no name, or the whole is a file that exists.
        if separator and "/" not in name and not Path(word).exists():
            path = Path(rest).expanduser()
            check_name(name)
        else:
            path = Path(word).expanduser()
            name = _name_of(path)
        if name in models:
            raise ModelNameError(
                f"two models are called {name!r}: {models[name]} and {path}; name them, as in {name}-2={path}"
            )
        models[name] = path
    return models


def check_name(name: str) -> None:
    """Raise :class:`ModelNameError` unless a model can be called so."""
    if not _NAME.fullmatch(name):
        raise ModelNameError(f"{name!r} is no name for a model: wanted up to 64 letters, digits and . _ + -")


def _name_of(path: Path) -> str:
    stem = path.resolve().name if path.is_dir() else path.stem
    name = re.sub(r"[^A-Za-z0-9._+-]+", "-", stem)[:64].strip("._-")
    if not name:
        raise ModelNameError(f"{path}: no name can be made of this; give one, as in NAME={path}")
    return name


def public_name(key: str) -> str:
    """The name that a version with this key is, or was, served under."""
    return key.rpartition("@")[0]


@dataclass(eq=False)
class Version:
    """A model as it is served under a name: one file, one arithmetic.

    Attributes:
        key: What the engine calls it; never used again for another file.
        info: What the engine said of it: device, backend, ...
        loaded_at: When it was ready, seconds since 1970.
        users: Requests that hold it.
    """

    source: Source
    dtype: str
    key: str
    info: dict[str, Any] = field(default_factory=dict)
    loaded_at: float = 0.0
    users: int = 0
    _retired: asyncio.Event | None = None

    @property
    def name(self) -> str:
        """The name it is served under."""
        return self.source.name

    @property
    def admission(self) -> Admission:
        """Which structures it takes."""
        return self.source.file.admission

    def acquire(self) -> None:
        """Hold it, so that it is not unloaded."""
        self.users += 1

    def release(self) -> None:
        """Let go of it."""
        self.users -= 1
        if self._retired is not None and self.users == 0:
            self._retired.set()

    async def retired(self) -> None:
        """Wait until nobody holds it; it must not be handed out any more."""
        self._retired = asyncio.Event()
        if self.users:
            await self._retired.wait()


class Registry:
    """The models that requests can name.

    Attributes:
        default: Model of requests that name none.
        on_change: Called when names point elsewhere than before.
    """

    def __init__(self, default: str | None = None) -> None:
        self.default = default
        self.on_change: Callable[[], None] = lambda: None
        self._current: dict[str, Version] = {}
        self._aliases: dict[str, str] = {}
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._current)

    @property
    def names(self) -> list[str]:
        """Names of the models, without aliases."""
        return list(self._current)

    @property
    def aliases(self) -> dict[str, str]:
        """Model by alias."""
        return dict(self._aliases)

    @property
    def versions(self) -> list[Version]:
        """The versions that names point to."""
        return list(self._current.values())

    def new_version(self, source: Source, dtype: str) -> Version:
        """A version of a model that no name points to yet."""
        return Version(source, dtype, f"{source.name}@{next(self._numbers)}")

    def put(self, version: Version) -> Version | None:
        """Point a name to a version; returns the version it pointed to before.

        Raises:
            ModelNameError: The name is an alias of another model.
        """
        if version.name in self._aliases:
            raise ModelNameError(f"{version.name!r} is an alias of {self._aliases[version.name]!r}")
        old = self._current.get(version.name)
        self._current[version.name] = version
        self.on_change()
        return old

    def remove(self, name: str) -> Version:
        """Take a model away, and its aliases with it.

        Raises:
            UnknownModelError: There is no such model.
        """
        if name not in self._current:
            raise UnknownModelError(name, self.names)
        self._aliases = {alias: model for alias, model in self._aliases.items() if model != name}
        version = self._current.pop(name)
        self.on_change()
        return version

    def alias(self, alias: str, name: str) -> None:
        """Let requests call a model by a second name; an alias that is there already moves.

        Raises:
            ModelNameError: The alias is no name, or the name of a model.
            UnknownModelError: There is no such model.
        """
        check_name(alias)
        if alias in self._current:
            raise ModelNameError(f"{alias!r} is a model of its own")
        if name not in self._current:
            raise UnknownModelError(name, self.names)
        self._aliases[alias] = name
        self.on_change()

    def unalias(self, alias: str) -> None:
        """Take an alias away.

        Raises:
            UnknownModelError: There is no such alias.
        """
        if self._aliases.pop(alias, None) is None:
            raise UnknownModelError(alias, list(self._aliases))
        self.on_change()

    def follow(self, versions: Sequence[Version], aliases: Mapping[str, str]) -> None:
        """Become what the registry of another process is."""
        self._current = {version.name: version for version in versions}
        self._aliases = dict(aliases)

    def get(self, name: str | None) -> Version:
        """The version that a request is for.

        Raises:
            UnknownModelError: No model or alias of this name.
            ModelNotGivenError: No name was given, several models are served and none is the default.
        """
        if name is None:
            if self.default is not None:
                name = self.default
            elif len(self._current) == 1:
                return next(iter(self._current.values()))
            else:
                raise ModelNotGivenError(self.names)
        version = self._current.get(name) or self._current.get(self._aliases.get(name, ""))
        if version is None:
            raise UnknownModelError(name, self.names)
        return version
