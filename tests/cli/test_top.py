"""``engine top``: one view of a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.cli._top_frame import Sample, frame, parsed, quantile
from engine.cli.app import run
from engine.core.keys import Keys
from engine.plugins.frontends.openai import OpenAIFrontend


@pytest.fixture(scope="module")
def url(served: Any) -> Iterator[str]:
    """A server with a key, one request behind it."""
    frontend = OpenAIFrontend()
    frontend.guard(Keys(["sesame"]))
    with served(frontend, executor="sim") as url:
        yield url


def top(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run(["top", *arguments])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_one_view(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = top(capsys, url, "--once", "--interval", "0.05", "--api-key", "sesame")
    assert code == 0
    for words in ("engine top", "sim at http://", "ready", "running", "0 requests", "pages", "of 4096 x 16 tokens",
                  "hit rate", "tokens/s", "accepted"):  # fmt: skip
        assert words in out, out


def test_no_server_and_no_key_are_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = top(capsys, url, "--once", "--api-key", "wrong")
    assert (code, err) == (2, "error: the API key is wrong\n")
    code, _, err = top(capsys, "http://127.0.0.1:1", "--once")
    assert code == 2
    assert err.startswith("error: no server answers at http://127.0.0.1:1")


def sample(at: float, text: str, state: str = "ready", cause: str | None = None) -> Sample:
    about: dict[str, Any] = {"model": "m", "state": state, "page_size": 4, "health": {"cause": cause}}
    return Sample(at, about, parsed(text))


BEFORE = """
engine_output_tokens_total 100.0
engine_requests_accepted_total 10.0
"""
NOW = """
# HELP engine_requests_running Requests
engine_requests_running 3.0
engine_requests_waiting 2.0
engine_waiting_tokens 17.0
engine_kv_pages 100.0
engine_kv_pages_pinned 40.0
engine_kv_pages_evictable 10.0
engine_kv_pages_free 50.0
engine_looked_up_tokens_total 200.0
engine_cached_tokens_total 50.0
engine_output_tokens_total 150.0
engine_requests_accepted_total 14.0
engine_requests_waiting_for{reason="pages"} 2.0
engine_requests_waiting_for{reason="policy"} 0.0
engine_requests_ended_total{reason="stop"} 9.0
engine_time_to_first_token_seconds_bucket{le="0.1"} 5.0
engine_time_to_first_token_seconds_bucket{le="1.0"} 10.0
engine_time_to_first_token_seconds_bucket{le="+Inf"} 10.0
engine_tenant_requests_accepted_total{tenant="team-a"} 4.0
engine_tenant_output_tokens_total{tenant="team-a"} 77.0
"""


def text_of(view: Any) -> str:
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(view)
    console.file.close()
    return console.export_text()


def test_what_a_view_says() -> None:
    said = text_of(frame("http://x", sample(0, BEFORE), sample(2, NOW, "draining", "told to stop")))
    for words in ("m at http://x draining", "told to stop", "running     3 requests", "2 requests, 17 prompt tokens",
                  "40 in use, 10 cached, 50 free of 100 x 4 tokens", "25.0% of 200 tokens", "25.0 generated",
                  "14 accepted, 2.0 a second", "waits for   pages 2", "stop 9", "p50 at most 0.1 s, p99 at most 1 s",
                  "team-a"):  # fmt: skip
        assert words in said, said
    assert "policy" not in said  # nobody waits for it


def test_quantiles_of_nothing_are_none() -> None:
    assert quantile(sample(0, BEFORE), "engine_step_seconds", 0.5) is None
    assert "nothing was looked up" in text_of(frame("u", sample(0, ""), sample(1, "")))


def test_samples_are_read_as_they_are_written() -> None:
    said = parsed('a 1.0\n# TYPE a counter\na_bucket{le="+Inf"} 3.0\nbad line here\n')
    assert said == {"a": 1.0, 'a_bucket{le="+Inf"}': 3.0}
