"""What a proxy is told: its engines, how it pairs and chooses them, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args
from urllib.parse import urlsplit

from engine.core.errors import ConfigError

Style = Literal["vllm", "sglang"]
Policy = Literal["cache-aware", "least-open", "round-robin"]
KV_HOST = "kv_host"


@dataclass(frozen=True)
class Address:
    """Where an engine is reached: by HTTP at ``url``, and by other engines at ``kv_host`` if that is not as it says."""

    url: str
    kv_host: str = ""

    @property
    def host(self) -> str:
        """The host of the URL, IPv6 without brackets."""
        return urlsplit(self.url).hostname or ""

    @classmethod
    def parse(cls, text: str, flag: str) -> Address:
        """``http://host:port`` or ``http://host:port,kv_host=HOST``. Raises ``ConfigError`` naming the flag."""
        url, *rest = (part.strip() for part in text.split(","))
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or parts.query or parts.fragment:
            raise ConfigError(f"{flag}: {url!r} is not a URL such as http://127.0.0.1:8001")
        kv_host = ""
        for part in rest:
            name, _, value = part.partition("=")
            if name.replace("-", "_") != KV_HOST or not value:
                raise ConfigError(f"{flag}: {part!r} after {url} is not {KV_HOST}=HOST")
            kv_host = value.strip("[]")
        return cls(url.rstrip("/"), kv_host)


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """All of them. Raises ``ConfigError`` where one makes no sense.

    Attributes:
        prefill, decode: the engines.
        connector: pair by this one only; empty: by the first that both sides have.
        style: ``vllm``: the prompt first, then its continuation; ``sglang``: both at once.
        prefill_required: answer 503 where no engine computes the prompt, instead of letting the other do it.
        prefill_timeout: seconds that a prompt may take.
        retries: other engines tried for a request, on each side.
        policy: who gets a request.
        match_threshold: share of a prompt that an engine must have seen for that to count.
        balance_abs, balance_rel: who has so many more open requests than the least loaded, and so many times as
            many, is not chosen for its prefixes.
        index_size: pieces of prompts remembered of each engine.
        poll: seconds between two looks at an engine.
        peer_timeout: seconds without an answer to such a look after which an engine is taken for gone.
        slow_reader: seconds after which a client that reads nothing is let go.
        shutdown_grace: seconds that open requests have to end after SIGTERM.
    """

    prefill: tuple[Address, ...] = ()
    decode: tuple[Address, ...]
    connector: str = ""
    style: Style = "vllm"
    prefill_required: bool = False
    prefill_timeout: float = 30.0
    retries: int = 2
    policy: Policy = "cache-aware"
    match_threshold: float = 0.3
    balance_abs: int = 8
    balance_rel: float = 1.5
    index_size: int = 65536
    poll: float = 1.0
    peer_timeout: float = 5.0
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    backend_api_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 8 * 2**20
    slow_reader: float = 60.0
    shutdown_grace: float = 5.0

    def __post_init__(self) -> None:
        if not self.decode:
            raise ConfigError("no engine answers: name at least one with --decode http://HOST:PORT")
        for side, engines in (("prefill", self.prefill), ("decode", self.decode)):
            urls = [one.url for one in engines]
            if twice := next((url for url in urls if urls.count(url) > 1), None):
                raise ConfigError(f"--{side} {twice} is given twice")
        if self.prefill_required and not self.prefill:
            raise ConfigError("--prefill-required: no engine is named with --prefill")
        for flag, value, choices in (("style", self.style, Style), ("policy", self.policy, Policy)):
            if value not in get_args(choices):
                raise ConfigError(f"--{flag} {value!r}: one of {', '.join(get_args(choices))}")
        for name in ("api_key", "backend_api_key"):
            key = getattr(self, name)
            if key is not None and (not key.strip() or not key.isascii() or not key.isprintable()):
                raise ConfigError(f"--{name.replace('_', '-')} is empty or no header can carry it")
        self._in_range()

    def _in_range(self) -> None:
        above_zero = ("prefill_timeout", "poll", "peer_timeout", "slow_reader")
        least = dict.fromkeys(("retries", "balance_abs", "match_threshold", "shutdown_grace", "port"), 0)
        least |= {"balance_rel": 1, "index_size": 1, "max_body_bytes": 1024}
        for name in (*above_zero, *least):
            value, flag = getattr(self, name), f"--{name.replace('_', '-')}"
            if name in above_zero and not value > 0:
                raise ConfigError(f"{flag} {value}: must be above 0")
            if name in least and not value >= least[name]:
                raise ConfigError(f"{flag} {value}: must be at least {least[name]}")
        if self.match_threshold > 1 or self.port > 65535:
            raise ConfigError("--match-threshold is a share, at most 1; --port at most 65535")
