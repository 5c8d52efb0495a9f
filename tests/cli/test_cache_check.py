"""The check of cache events finds what is wrong: a server that tells lies, on a real socket."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.core.cache_events import POOL, CacheBatch, CacheEvent, CacheSnapshot, plain

A, B, C = (bytes([n]) * 32 for n in range(3))
LIES = {
    "true": ([CacheEvent("stored", POOL, B, A), CacheEvent("removed", POOL, A)], [B]),
    "not told": ([CacheEvent("stored", POOL, B, A), CacheEvent("removed", POOL, A)], [B, C]),
    "not there": ([CacheEvent("stored", POOL, B, A), CacheEvent("stored", POOL, C)], [A, B]),
}


@pytest.fixture(params=LIES)
def liar(request):
    events, cached = LIES[request.param]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            if self.path == "/v1/cache/snapshot":
                answer = plain(CacheSnapshot("e", 1, 4, [CacheEvent("stored", POOL, A)]))
            elif self.path == "/v1/cache/dump":
                answer = {"epoch": "e", "sequence": 3, "tier": "pool", "keys": [key.hex() for key in cached]}
            else:
                assert self.path == "/v1/cache/events?epoch=e&from=1"
                later = [CacheEvent("stored", POOL, bytes(31) + b"z")]  # after the dump: not to be taken in
                for number, batch in ((1, events[:1]), (2, [*events[1:], *later])):
                    event = json.dumps(plain(CacheBatch("e", number, 4, batch)))
                    self.wfile.write(f"data: {event}\n\n".encode())
                return
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield request.param, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_lies_are_found(liar, here):
    lie, url = liar
    code, out, err = here("cache", "check", url, "--seconds", "0")
    assert not err
    if lie == "true":
        assert code == 0
        assert out.endswith("equal: 1 pages\n")
    else:
        assert code == 1
        words = {"not told": f"1 pages are cached, and not in the index: {C.hex()}",
                 "not there": f"1 pages are in the index, and not cached: {C.hex()}"}  # fmt: skip
        assert words[lie] in out
