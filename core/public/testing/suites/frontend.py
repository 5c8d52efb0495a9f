"""What every frontend must do: serve, refuse, let go of who leaves, and stop without a trace."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException
from typing import Any, ClassVar

from engine.core.protocols import Plugin
from engine.testing.clients import Answer, FrontendClient, OpenAIClient, Refused
from engine.testing.guard import Violation
from engine.testing.serving import PROMPTS, TOKENS, Books, Served
from engine.testing.suites.base import Suite

KEY = "sesame"
LONG = 4000  # tokens: eight seconds and more, so that whoever is let go of has not ended by himself


class FrontendSuite(Suite):
    """Rules of a frontend that listens on a host and a port. It serves in a process of its own, around a real engine
    whose model is simulated; what happens to requests is read off the engine's books.

    Class attributes:
        client: how to talk to it: a ``FrontendClient``. The default speaks OpenAI's completions.
        engine: fields of the engine's configuration.
        patience: seconds that it has to begin to listen, to stop, to notice that a client has left.
    """

    role = "frontend"
    client: ClassVar[type[FrontendClient]] = OpenAIClient
    engine: ClassVar[Mapping[str, Any]] = {}
    patience: ClassVar[float] = 30.0
    shared: ClassVar[Served | None] = None

    def served(self, **settings: Any) -> Served:
        """A frontend of one's own, to be closed."""
        given = {"engine": self.engine, "patience": self.patience, **settings}
        return Served(self.found().cls, {**self.options}, **given)

    def running(self) -> Served:
        """One that serves with ``KEY`` and is shared by the rules that leave it as it was."""
        cls = type(self)
        if cls.shared is None:
            cls.shared = self.served(api_key=KEY)
            cls.shared.listening()
        self.idle(cls.shared)
        return cls.shared

    @classmethod
    def teardown_class(cls) -> None:
        """End the shared one; pytest and ``check`` call it."""
        if cls.shared is not None:
            shared, cls.shared = cls.shared, None
            shared.close()

    def talk(self, served: Served, key: str | None = KEY) -> FrontendClient:
        """A client of it."""
        client = self.client(*served.address, key)
        client.timeout = self.patience
        return client

    # ---- life

    def test_it_starts_and_stops(self) -> None:
        """It listens on a free port of its choice where the port is 0; told to stop by SIGTERM or SIGINT, with clients
        connected, serve returns 0, and neither a thread nor a socket is left."""
        for number in (signal.SIGTERM, signal.SIGINT):
            with self.served() as served, socket.create_connection(served.listening().address):
                client = self.talk(served, None)
                self._right(client.ask(PROMPTS[0], TOKENS).text, served.expected[0], "the first answer")
                end = served.stop(number)
                name = signal.Signals(number).name
                if end["code"] != 0:
                    raise Violation(f"after {name} serve must return 0; {end['words']}")
                for kind in ("threads", "sockets"):
                    if end[kind]:
                        raise Violation(f"after {name} and close() {kind} are left: {', '.join(end[kind])}")

    def test_a_port_in_use_is_an_error(self) -> None:
        """Where it cannot listen it raises ``ConfigError`` (or another ``EngineError``): people read one line."""
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with self.served(port=taken.getsockname()[1]) as served:
                end = served.end("the port is in use, and serve does not say so")
                if not end["refused"]:
                    raise Violation(f"the port is in use, and serve must raise an EngineError; {end['words']}")

    # ---- requests

    def test_requests_are_answered(self) -> None:
        """Each request gets its own answer, whole or in pieces, alone or among others, and a stream ends."""
        served = self.running()

        def whole(number: int) -> str:
            answer = self.talk(served).ask(PROMPTS[number], TOKENS)
            if answer.finish != "length":
                raise Violation(f"a request of {TOKENS} tokens ended by {answer.finish!r}, which is 'length'")
            return answer.text

        def pieces(number: int) -> str:
            return "".join(self.talk(served).stream(PROMPTS[number], TOKENS))

        numbers = list(range(len(PROMPTS))) * 3
        with ThreadPoolExecutor(2 * len(numbers)) as pool:
            found = [(n, how, pool.submit(how, n)) for n in numbers for how in (whole, pieces)]
            for number, how, answer in found:
                self._right(answer.result(), served.expected[number], f"prompt {number}, {how.__name__}")
        self.idle(served)

    def test_it_tells_that_all_is_well(self) -> None:
        """It says that its engine is well, while that is so."""
        if not self.talk(self.running()).healthy():
            raise Violation("the engine is well, and the frontend says that it is not")

    def test_who_leaves_ends_his_request(self) -> None:
        """A client that leaves, in the middle of a stream or before a whole answer, ends its request in the engine, and
        nobody else's; one that leaves in the middle of its own request harms nobody."""
        served = self.running()
        for leave in (self._leave_stream, self._leave_whole):
            before = self.idle(served)
            neighbour = self.talk(served).stream(PROMPTS[1], TOKENS)
            said = [next(neighbour)]
            leave(served, before.accepted + 1)
            self.talk(served).vanish()
            self._right("".join([*said, *neighbour]), served.expected[1], "the neighbour of a client that left")
            after = self.idle(served, "a client has left, and its request goes on")
            if after.ended["abort"] != before.ended["abort"] + 1:
                raise Violation(f"one request of two was left; the books say {_news(before, after)}")

    def _leave_stream(self, served: Served, accepted: int) -> None:
        stream = self.talk(served).stream(PROMPTS[0], LONG)
        next(stream)
        stream.close()  # type: ignore[attr-defined]

    def _leave_whole(self, served: Served, accepted: int) -> None:
        leave = self.talk(served).begin(PROMPTS[0], LONG)
        served.wait_for("a request was sent, and is not accepted", lambda books: books.accepted > accepted)
        leave()

    def test_a_bad_request_is_refused(self) -> None:
        """A bad request is answered with an error and not accepted; requests beside it and after it are served."""
        served = self.running()
        for words, send in self.talk(served).nonsense():
            before = self.idle(served)
            neighbour = self.talk(served).stream(PROMPTS[2], TOKENS)
            said = [next(neighbour)]
            self._refused(send, words)
            self._right("".join([*said, *neighbour]), served.expected[2], f"the neighbour of {words}")
            after = self.idle(served)
            if after.accepted != before.accepted + 1:
                raise Violation(f"{words} was refused, and accepted by the engine: {_news(before, after)}")
        self._right(self.talk(served).ask(PROMPTS[0], TOKENS).text, served.expected[0], "the one after them")

    def test_the_key_is_asked_for(self) -> None:
        """With an api_key, a request without it, or with another, is refused and not accepted."""
        served = self.running()
        before = self.idle(served)
        for key in (None, "wrong", KEY + "x"):
            self._refused(partial(self.talk(served, key).ask, PROMPTS[0], TOKENS), f"the key {key!r}")
        if self.idle(served) != before:
            raise Violation("a request without the key was accepted by the engine")

    # ---- the end of the engine

    def test_a_dead_engine_is_told(self) -> None:
        """When the engine dies, an open stream ends with an error, requests are refused, and health says so; told to
        stop, serve returns another code than 0."""
        with self.served(in_process=False, engine={**self.engine, "heartbeat_timeout": 2}) as served:
            client = self.talk(served.listening(), None)
            stream = client.stream(PROMPTS[0], LONG)
            next(stream)
            served.kill_engine()
            self._refused(lambda: "".join(stream), "a stream of a dead engine", ended=True)
            self._refused(lambda: client.ask(PROMPTS[0], TOKENS), "a request to a dead engine")
            if client.healthy():
                raise Violation("the engine is dead, and the frontend says that all is well")
            end = served.stop()
            if end["code"] in (0, None):
                raise Violation(f"the engine died, and serve must return another code than 0; {end['words']}")

    def try_once(self, plugin: Plugin) -> None:
        """Made and closed: it serves in a process of its own, in the other rules."""
        plugin.close()

    # ---- helpers

    def idle(self, served: Served, what: str = "nobody asks any more, and requests are open") -> Books:
        """The books once no request is open."""
        return served.wait_for(what, lambda books: books.open == 0)

    @staticmethod
    def _right(found: str, wanted: str, who: str) -> None:
        if found != wanted:
            raise Violation(f"{who} says {found!r}, and the engine says {wanted!r}")

    @staticmethod
    def _refused(send: Callable[[], Any], words: str, *, ended: bool = False) -> None:
        """An error must come of it, not silence: whoever asked must know why."""
        try:
            answer = send()
        except Refused:
            return
        except (OSError, EOFError, HTTPException) as error:
            if ended:  # the protocol may have no other way to say that it goes on no more
                return
            raise Violation(f"{words} must be answered with an error, and the connection broke: {error!r}") from error
        text = answer.text if isinstance(answer, Answer) else answer
        raise Violation(f"{words} must be refused, and was answered: {text!r}")


def _news(before: Books, after: Books) -> str:
    ended = {reason: n - before.ended[reason] for reason, n in after.ended.items() if n != before.ended[reason]}
    return f"{after.accepted - before.accepted} accepted, ended: {ended}"
