"""``engine proxy``: one front for engines that compute prompts and engines that go on with them."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

ENGINES, CHOICE, WAITING, SERVER = "Engines", "Who gets a request", "How long to wait", "Server"


def _flag(name: str, panel: str, words: str, metavar: str = "N", envvar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        f"--{name}", rich_help_panel=panel, help=words, metavar=metavar, envvar=envvar, show_envvar=envvar is not None
    )
    return option


def proxy(
    *,
    decode: Annotated[
        list[str], _flag("decode", ENGINES, "Engine that answers (repeatable).", "URL[,kv_host=HOST]")
    ],
    prefill: Annotated[
        list[str] | None,
        _flag("prefill", ENGINES, "Engine that computes prompts (repeatable). kv_host: where the other engines reach "
              "its connector, if that is not where it says.", "URL[,kv_host=HOST]"),
    ] = None,
    connector: Annotated[
        str, _flag("connector", ENGINES, "Hand over by this one only. \\[default: the first that both have]", "NAME")
    ] = "",
    backend_api_key: Annotated[
        str | None, _flag("backend-api-key", ENGINES, "Key that the engines want.", "KEY", "ENGINE_BACKEND_API_KEY")
    ] = None,
    style: Annotated[
        str,
        _flag("style", CHOICE, "vllm: the prompt first, then its continuation; sglang: both at once.", "vllm|sglang"),
    ] = "vllm",
    policy: Annotated[
        str,
        _flag("policy", CHOICE, "Who gets a request: who has seen its beginning, who has fewest, or in turns.",
              "cache-aware|least-open|round-robin"),
    ] = "cache-aware",
    match_threshold: Annotated[
        float, _flag("match-threshold", CHOICE, "Share of a prompt that must have been seen there to count.")
    ] = 0.3,
    balance_abs: Annotated[
        int, _flag("balance-abs", CHOICE, "Who has so many more open requests than the least loaded, …")
    ] = 8,
    balance_rel: Annotated[
        float, _flag("balance-rel", CHOICE, "… and so many times as many, is not chosen for what it has seen.")
    ] = 1.5,
    index_size: Annotated[
        int, _flag("index-size", CHOICE, "Pieces of prompts (128 bytes each) remembered of each engine.")
    ] = 65536,
    prefill_required: Annotated[
        bool,
        typer.Option("--prefill-required", rich_help_panel=CHOICE,
                     help="Answer 503 where no engine computes prompts, instead of letting the other do both."),
    ] = False,
    retries: Annotated[int, _flag("retries", CHOICE, "Other engines tried for a request, on each side.")] = 2,
    prefill_timeout: Annotated[float, _flag("prefill-timeout", WAITING, "Seconds that a prompt may take.")] = 30.0,
    poll: Annotated[float, _flag("poll", WAITING, "Seconds between two looks at an engine.")] = 1.0,
    peer_timeout: Annotated[
        float, _flag("peer-timeout", WAITING, "Seconds of silence after which an engine is taken for gone.")
    ] = 5.0,
    slow_reader: Annotated[
        float, _flag("slow-reader", WAITING, "Seconds after which a client that reads nothing is let go.")
    ] = 60.0,
    shutdown_grace: Annotated[
        float, _flag("shutdown-grace", WAITING, "Seconds that open requests have to end after SIGTERM.")
    ] = 5.0,
    host: Annotated[str, _flag("host", SERVER, "Address to listen on.", "HOST")] = "127.0.0.1",
    port: Annotated[int, _flag("port", SERVER, "Port to listen on (0: any free one).")] = 8000,
    api_key: Annotated[
        str | None, _flag("api-key", SERVER, "Bearer token that clients must send.", "KEY", "ENGINE_API_KEY")
    ] = None,
    max_body_bytes: Annotated[
        int, _flag("max-body-bytes", SERVER, "Largest request body; more is answered with 413.")
    ] = 8 * 2**20,
) -> None:  # fmt: skip
    """Serve engines as one: some compute prompts (--prefill), others go on with them (--decode).

    An OpenAI-compatible server. Each request's prompt is computed by one engine, which hands its KV to the engine that
    answers. Where that fails the request is tried elsewhere, as long as nothing of an answer was sent. Without
    --prefill it spreads requests over the engines, those with a common beginning to the same one.

    engine serve --port 8001 --role prefill --connector local

    engine serve --port 8002 --role decode --connector local

    engine proxy --port 8000 --prefill http://127.0.0.1:8001 --decode http://127.0.0.1:8002
    """
    from engine.proxy.options import Address, ProxyOptions
    from engine.proxy.serve import serve

    options = ProxyOptions(
        prefill=tuple(Address.parse(text, "--prefill") for text in prefill or ()),
        decode=tuple(Address.parse(text, "--decode") for text in decode),
        connector=connector, style=style, policy=policy, match_threshold=match_threshold,  # type: ignore[arg-type]
        balance_abs=balance_abs, balance_rel=balance_rel, index_size=index_size, prefill_required=prefill_required,
        retries=retries, prefill_timeout=prefill_timeout, poll=poll, peer_timeout=peer_timeout,
        slow_reader=slow_reader, shutdown_grace=shutdown_grace, host=host, port=port, api_key=api_key,
        backend_api_key=backend_api_key, max_body_bytes=max_body_bytes,
    )  # fmt: skip
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    raise typer.Exit(serve(options))
