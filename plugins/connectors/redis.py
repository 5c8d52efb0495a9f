"""``redis``: pages on a Redis server that engines of one kind share. Slow beside memory and disk, and everybody's.

    <prefix>:<layout digest>:<key>   ->   a frame (``_frames``)

The client reconnects by itself. A server that cannot be reached, or does not answer within a quarter of ``patience``,
is left alone for a while: look-ups find nothing, loads and saves fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import Field, SecretStr

from engine.core.errors import ConfigError
from engine.core.memory import Bytes, KVLayout
from engine.plugins.connectors._frames import DamagedPage, header_of, unframed
from engine.plugins.connectors._health import Unreachable
from engine.plugins.connectors._store import StoreConnector, StoreOptions

SCHEMES = ("redis://", "rediss://", "unix://")
SCANNED = 1000  # keys that are deleted by one command


class RedisStore(StoreConnector):
    """A tier on a Redis server. What is evicted, and when, is the server's to say (``maxmemory-policy``)."""

    name = "redis"
    remote = True
    threads = 2
    slice_bytes = 4 * 2**20

    class Options(StoreOptions):
        url: SecretStr = Field(
            SecretStr("redis://127.0.0.1:6379/0"), description="redis://[USER:PASSWORD@]HOST:PORT/DB or unix://PATH"
        )
        prefix: str = Field("sixhooks", description="how the keys on the server begin")
        ttl: int = Field(0, ge=0, description="seconds that a page is kept after its last use; 0: for ever")

    def open(self, layout: KVLayout) -> None:
        """Make the client; the server need not be there yet. Raises ``ConfigError``."""
        try:
            import redis
        except ImportError as error:
            raise ConfigError("connector redis needs redis: pip install 'sixhooks[redis]'") from error
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        url = self.options.url.get_secret_value()
        if not url.startswith(SCHEMES):
            raise ConfigError(f"connector redis: option url must begin with {', '.join(SCHEMES)}")
        self._lost = (redis.ConnectionError, redis.TimeoutError, OSError)
        self._broken = redis.RedisError
        seconds = self.patience / 4
        again = Retry(NoBackoff(), 1, supported_errors=(redis.ConnectionError,))  # the server may have been restarted
        try:
            self._client = redis.Redis.from_url(
                url, socket_timeout=seconds, socket_connect_timeout=seconds, retry=again
            )
        except ValueError:
            raise ConfigError("connector redis: option url is no address of a Redis server") from None
        self._front = f"{self.options.prefix}:{layout.digest}:".encode()

    def has_many(self, keys: Sequence[bytes]) -> int:
        """How many of the first are there; those count as used now. Raises ``Unreachable``."""
        ttl = self.options.ttl
        commands = [("EXPIRE", name, ttl) if ttl else ("TOUCH", name) for name in self._names(keys)]
        answers = self._ask(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return next((at for at, answer in enumerate(answers) if answer != 1), len(keys))

    def get_many(self, keys: Sequence[bytes]) -> Sequence[Bytes | Exception | None]:
        """Fetch and check pages. What is not a page of ours is deleted. Raises ``Unreachable``."""
        (values,) = self._ask([("MGET", *self._names(keys))])
        if isinstance(values, Exception):
            raise values
        found: list[Bytes | Exception | None] = []
        for key, value in zip(keys, values, strict=True):
            if value is None:
                self.told("removed", [key])
                found.append(None)
                continue
            try:
                found.append(unframed(self._layout.digest, key, self._layout.page_bytes, value))
            except DamagedPage as error:
                self._ask([("UNLINK", *self._names([key]))])
                self.told("removed", [key])
                found.append(error)
        return found

    def put_many(self, keys: Sequence[bytes], contents: Sequence[Bytes]) -> None:
        """Set them in one go. Raises ``Unreachable``, and ``RedisError`` where the server refuses one (it is full)."""
        ttl = ("EX", self.options.ttl) if self.options.ttl else ()
        values = [
            header_of(self._layout.digest, key, content) + content.tobytes()
            for key, content in zip(keys, contents, strict=True)
        ]
        names = self._names(keys)
        answers = self._ask([("SET", name, value, *ttl) for name, value in zip(names, values, strict=True)])
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        kept = [key for key, answer in zip(keys, answers, strict=True) if not isinstance(answer, Exception)]
        self.told("stored", kept)
        if refused:
            raise refused[0]

    def forget_all(self) -> int:
        """Delete the pages of this layout, whoever saved them. Raises ``Unreachable``."""
        gone = 0
        try:
            for name in self._client.scan_iter(match=_literally(self._front) + b"*", count=SCANNED):
                gone += int(self._client.unlink(name))
                self.told("removed", [name[len(self._front) :]])
        except self._lost as error:
            raise Unreachable(str(error)) from error
        return gone

    def close(self) -> None:
        """End the connections."""
        super().close()
        if hasattr(self, "_client"):
            self._client.close()

    # ---- inside

    def _names(self, keys: Iterable[bytes]) -> list[bytes]:
        return [self._front + key for key in keys]

    def _ask(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Answers in order; what the server refused is an exception there. Raises ``Unreachable``."""
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        try:
            return list(pipe.execute(raise_on_error=False))
        except self._lost as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        finally:
            pipe.reset()


def _literally(text: bytes) -> bytes:
    """A pattern of the server's that matches just this."""
    return b"".join(b"\\" + bytes([char]) if char in b"*?[]\\^-" else bytes([char]) for char in text)
