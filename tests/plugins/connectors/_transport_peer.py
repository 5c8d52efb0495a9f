"""The other side of a transport's tests, in a process of its own: ``python _transport_peer.py WHICH BYTES FILL``.

It opens a transport over memory and prints its card and the memory's address; then it answers questions on stdin.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from engine.plugins.connectors._transport import Transport
from engine.plugins.executors._memfd import MARK, shared_file

WHICH = ("shared", "nixl", "nixl-shm", "nixl-push", "mooncake")


def made(which: str, size: int, fill: int) -> tuple[Transport, np.ndarray, list]:
    """A transport that is not open yet, the memory that it is to move, and what holds that."""
    shared, mapped = shared_file(size + MARK) or (None, bytearray(size + MARK))
    memory = np.frombuffer(mapped, np.uint8, offset=MARK)
    memory[:] = fill
    if which == "shared":
        from engine.plugins.connectors._shared import SharedTransport

        return SharedTransport(shared), memory, [shared]
    if which.startswith("nixl"):
        from engine.plugins.connectors._nixl import NixlPushTransport, NixlTransport

        kind = NixlPushTransport if which == "nixl-push" else NixlTransport
        return kind("tcp,shm,self" if which == "nixl-shm" else "tcp,self", "lo"), memory, [shared]
    from engine.plugins.connectors._mooncake import MooncakeTransport

    return MooncakeTransport(), memory, [shared]


def main() -> None:
    """Answer until stdin ends."""
    which, size, fill = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    transport, memory, _ = made(which, size, fill)
    print(json.dumps([transport.open([memory]), memory.ctypes.data]), flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "pattern":
            memory[:] = np.random.default_rng(int(numbers[0])).integers(0, 256, size, np.uint8)
        if word == "count":
            print(int((memory == int(numbers[0])).sum()), flush=True)
        elif word == "digest":
            print(int(memory.view(np.uint64).sum()), flush=True)
        else:
            print("ok", flush=True)
    transport.close()


if __name__ == "__main__":
    main()
