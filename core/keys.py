"""API keys: who may ask, and as whom. Told apart in constant time, never shown."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.config import KEY, EngineConfig
from engine.core.errors import ConfigError

if TYPE_CHECKING:
    from engine.core.protocols import Frontend

LABELLED = re.compile(r"([A-Za-z0-9_.-]{1,64}):\s*(.*)")


class Keys:
    """The keys of a server. Only digests are kept, under a secret of this process.

    Args:
        plain: keys without a label.
        file: one key a line, ``label: key`` or ``key``; empty lines and those that begin with ``#`` are skipped. A key
            with a colon in it needs a label.

    Raises:
        ConfigError: the file cannot be read, a line is no key, a key stands twice, or there is none at all. No key is
            in the message.
    """

    def __init__(self, plain: Sequence[str] = (), file: str | Path | None = None) -> None:
        self._secret = secrets.token_bytes(32)
        self._plain = tuple(plain)
        self._file = Path(file) if file is not None else None
        self._known: list[tuple[bytes, str]] = []
        self.reload()

    def __repr__(self) -> str:
        return f"<{len(self)} API keys>"

    def __len__(self) -> int:
        return len(self._known)

    @property
    def from_file(self) -> bool:
        """Whether there is a file that ``reload`` reads."""
        return self._file is not None

    @property
    def labels(self) -> list[str]:
        """The labels that there are, in order."""
        return list(dict.fromkeys(label for _, label in self._known if label))

    def holder(self, given: str) -> str | None:
        """The label of a key (empty: it has none), ``None`` where it is none of ours.

        All keys are compared, by digests of one length: how long it takes says nothing.
        """
        wanted = self._digest(given)
        found: str | None = None
        for digest, label in self._known:
            if hmac.compare_digest(digest, wanted):
                found = label
        return found

    def digest_of(self, given: str) -> bytes | None:
        """What may be kept in place of a key, to ask later whether it is ``in_force``; ``None``: it is none of ours."""
        return None if self.holder(given) is None else self._digest(given)

    def in_force(self, digest: bytes) -> bool:
        """Whether the key with this digest is one of ours still."""
        return any(hmac.compare_digest(known, digest) for known, _ in self._known)

    def reload(self) -> None:
        """Read the file again. Mutates, but where it raises ``ConfigError``: then the keys are as before."""
        known: dict[bytes, str] = {}
        for label, key, where in (*(("", key, "api_key") for key in self._plain), *self._of_file()):
            if not KEY.fullmatch(key):
                raise ConfigError(f"{where}: a key is printable ASCII without spaces: it travels in a header")
            digest = self._digest(key)
            if digest in known:
                raise ConfigError(f"{where}: this key is given twice")
            known[digest] = label
        if not known:
            raise ConfigError(f"{self._file or 'api_key'}: there is no key in it, which would protect nothing")
        self._known = list(known.items())

    def _of_file(self) -> Iterator[tuple[str, str, str]]:
        """Label, key, and where it stands."""
        if self._file is None:
            return
        for number, line in enumerate(self._lines(), 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            labelled = LABELLED.fullmatch(text)
            label, key = labelled.groups() if labelled else ("", text)
            yield label, key, f"{self._file}, line {number}"

    def _lines(self) -> Iterable[str]:
        assert self._file is not None
        try:
            return self._file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            words = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"api_key_file {self._file}: {words}") from None

    def _digest(self, key: str) -> bytes:
        return hmac.digest(self._secret, key.encode(errors="surrogateescape"), "sha256")


def guarded(frontend: Frontend, config: EngineConfig) -> str | None:
    """Give a frontend the keys of a configuration. Returns the key where there is one and no file: any frontend knows
    that much, by ``api_key``.

    Raises:
        ConfigError: the file of keys cannot be used, or the frontend does not know several keys.
    """
    if config.api_key_file is None and len(config.api_key) <= 1:
        return next(iter(config.api_key), None)
    frontend.guard(Keys(config.api_key, config.api_key_file))
    return None
