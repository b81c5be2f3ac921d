"""Bearer keys: who may ask, and who may change what is served."""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from nepserve.settings import SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nepserve.settings import Settings


@dataclass(frozen=True)
class Key:
    """A key that was handed out: its name, the digest of its secret, and whether it opens the admin routes."""

    name: str
    digest: bytes
    admin: bool = False

    @classmethod
    def make(cls, name: str, secret: str, *, admin: bool = False) -> Key:
        """A key from its secret, which is not kept."""
        return cls(name, sha256(secret.encode()).digest(), admin)


class Keys:
    """The keys of a server. Without any, everybody may do everything."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = tuple(keys)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> list[str]:
        """Names of the keys."""
        return [key.name for key in self._keys]

    @property
    def entries(self) -> list[tuple[str, bytes, bool]]:
        """Name, digest and rights of each, for another process to make the same of."""
        return [(key.name, key.digest, key.admin) for key in self._keys]

    def match(self, authorization: bytes | None) -> Key | None:
        """The key of an ``Authorization`` header; every key is compared, in constant time, for time to tell nothing."""
        scheme, _, secret = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = sha256(secret.strip()).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found


def keys_of(settings: Settings) -> tuple[Keys, str | None]:
    """The keys of a server with these settings, and the secret of a key that was made for it (None if none was).

    A server that others can reach and that was given no key makes one, unless ``insecure`` says that it may be open.

    Raises:
        SettingsError: A key file that cannot be read, or an entry that is no key.
    """
    keys = [_parse(value.get_secret_value().split(":"), "--api-keys") for value in settings.api_keys]
    if settings.api_key_file is not None:
        try:
            text = settings.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{settings.api_key_file}: {error}") from None
        for number, line in enumerate(text.splitlines(), 1):
            words = line.partition("#")[0].split()
            if words:
                keys.append(_parse(words, f"{settings.api_key_file}, line {number}"))
        if not keys:
            raise SettingsError(f"{settings.api_key_file}: there is no key in this file")
    names = [key.name for key in keys]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"two API keys are called {name!r}")
    if keys or settings.insecure or settings.is_local:
        return Keys(keys), None
    secret = secrets.token_urlsafe(32)
    return Keys([Key.make("made-at-start", secret, admin=True)]), secret


def _parse(words: list[str], where: str) -> Key:
    # The secret itself is kept out of the message: it ends in logs.
    if len(words) not in {2, 3} or not all(words) or (len(words) == 3 and words[2] != "admin"):
        raise SettingsError(f"{where}: wanted a name and a key, and the word admin for a key that may change models")
    if len(words[1]) < 16:
        raise SettingsError(f"{where}: the key called {words[0]!r} is shorter than 16 characters")
    return Key.make(words[0], words[1], admin=len(words) == 3)
