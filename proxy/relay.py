"""One request, from the client to the engines and back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

import httpx
import msgspec

from engine.plugins.frontends._errors import RETRY_AFTER_SECONDS, HTTPError
from engine.proxy.bodies import EMBEDDINGS, Wish
from engine.proxy.choosing import Chooser
from engine.proxy.events import END, Splitter, content, each, error_of, is_opening
from engine.proxy.faults import (
    DEADLINE,
    NOT_THE_CLIENTS,
    QUEUE,
    Answer,
    DeadlinePassed,
    PeerFailed,
    PrefillFailed,
    PromptRefused,
    code_of,
    is_busy,
    is_the_clients,
    message_of,
    words_of,
)
from engine.proxy.fleet import Fleet, none_ready
from engine.proxy.metrics import Metrics
from engine.proxy.options import ProxyOptions
from engine.proxy.outlet import Outlet
from engine.proxy.peers import Peer, Side, break_off

log = logging.getLogger("engine.proxy")


class Relay:
    """What is common to all requests, and what is done with one."""

    def __init__(self, options: ProxyOptions, fleet: Fleet, chooser: Chooser, metrics: Metrics) -> None:
        self.options, self.fleet, self.chooser, self.metrics = options, fleet, chooser, metrics

    async def serve(self, wish: Wish, headers: Mapping[str, str], out: Outlet) -> str:
        """Answer a request. Returns how it ended: one of ``engine.proxy.metrics.OUTCOMES``."""
        course = Course(self, wish, headers, out)
        try:
            return await course.run()
        except HTTPError as error:
            await out.fail(error)
            return "unavailable"
        except DeadlinePassed as late:
            await out.whole(*late.answer)
            return "refused"
        except PeerFailed as failure:
            if out.started:
                await out.fail(HTTPError(502, str(failure), "server_error", code="engine_lost"))
                return "broken"
            if failure.answer is None or failure.answer.status in (401, 403):
                await out.fail(unavailable(str(failure)))
                return "unavailable"
            await out.whole(*failure.answer)
            return "failed"


def unavailable(words: str) -> HTTPError:
    """503, to be tried again."""
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    return HTTPError(503, words, "server_error", code="no_engine", headers=headers)


class Course:
    """The way of one request."""

    def __init__(self, relay: Relay, wish: Wish, headers: Mapping[str, str], out: Outlet) -> None:
        self._fleet, self._chooser, self._metrics = relay.fleet, relay.chooser, relay.metrics
        self._options = relay.options
        self._wish, self._headers, self._out = wish, headers, out
        self._expects = relay.options.style == "sglang"
        self._failed_givers: list[Peer] = []
        self._refused = False
        self._scope: asyncio.Timeout | None = None  # of the engine that is asked for the answer
        self._in_vain = ""  # why it waits for nothing

    async def run(self) -> str:
        """To its end. Raises ``HTTPError`` where nobody can be asked, ``PeerFailed`` where whoever was asked failed,
        ``DeadlinePassed``."""
        embeds = self._wish.path == EMBEDDINGS  # a prompt and nothing after it: nothing is handed over
        giver = None if self._expects or embeds else await self._computed()
        tried: list[Peer] = []
        failure: PeerFailed | None = None
        while len(tried) <= self._options.retries:
            taker = self._embedder(tried) if embeds else self._choose("decode", self._fleet.takers(giver, tried))
            if taker is None:
                break
            if tried:
                self._metrics.retried(taker.side)
            tried.append(taker)
            try:
                return await (self._together(taker) if self._expects and not embeds else self._decode(taker, giver))
            except PeerFailed as error:
                log.warning("%s", error)
                failure = error
                if self._out.started:
                    break
        if failure is not None:
            raise failure
        raise unavailable(none_ready("decode", self._fleet.decode))

    def _embedder(self, tried: Sequence[Peer]) -> Peer | None:
        """Who computes embeddings: an engine for prompts; where none is ready, one that answers."""
        for side, peers in (("prefill", self._fleet.prefill), ("decode", self._fleet.decode)):
            able = [peer for peer in peers if peer.ready and peer not in tried]
            if able:
                return self._choose("prefill" if side == "prefill" else "decode", able)
        return None

    # ---- the prompt

    async def _computed(self) -> Peer | None:
        """Have the prompt computed. Who has it now; ``None`` where whoever answers computes it."""
        while (giver := self._next_giver(self._fleet.givers(self._failed_givers))) is not None:
            try:
                await self._prefill(giver)
                return giver
            except PromptRefused:
                return None
            except PeerFailed as error:
                log.warning("%s", error)
        return None

    def _next_giver(self, able: Sequence[Peer]) -> Peer | None:
        """The next to try. Raises ``HTTPError`` where there must be one and is none."""
        tried = len(self._failed_givers)
        giver = None
        if tried <= self._options.retries and not self._refused:
            giver = self._choose("prefill", able)
        if giver is None and self._options.prefill_required and not self._refused:
            raise unavailable(none_ready("prefill", self._fleet.prefill))
        if giver is not None and tried:
            self._metrics.retried("prefill")
        return giver

    async def _prefill(self, giver: Peer) -> None:
        """Let an engine compute the prompt and keep it for the other one. Raises ``PeerFailed``, ``PromptRefused``,
        ``DeadlinePassed``."""
        body = self._wish.for_prefill(self._fleet.giving(giver))
        begun, seconds = time.monotonic(), self._options.prefill_timeout
        try:
            async with asyncio.timeout(seconds) as scope:
                with giver.busy(), giver.while_heard(scope):
                    answer = await self._fleet.client.post(
                        giver.url + self._wish.path, content=body, headers=self._headers
                    )
        except TimeoutError:
            words = giver.cause or f"has not computed a prompt within {seconds:g} s"
        except httpx.HTTPError as error:
            words = words_of(error)
        else:
            if answer.status_code == 200:
                giver.failures = 0
                self._metrics.prefill.observe(time.monotonic() - begun)
                return
            if is_the_clients(answer.status_code):
                self._refused = True
                raise PromptRefused
            if code_of(answer.content) == DEADLINE:
                raise DeadlinePassed(Answer(answer.status_code, answer.headers, answer.content))
            words = f"answers {answer.status_code}: {message_of(answer.content)}"
            if is_busy(answer.status_code, answer.content):
                self._failed_givers.append(giver)
                raise PeerFailed(giver, words)
        self._failed_givers.append(giver)
        giver.suspect(words)
        raise PeerFailed(giver, words)

    # ---- the answer

    async def _together(self, taker: Peer) -> str:
        """The prompt and its continuation at once: the one engine waits for what the other computes."""
        while True:
            able = [giver for giver in self._fleet.givers(self._failed_givers) if self._fleet.pair(giver, taker)]
            giver = self._next_giver(able)
            try:
                return await self._decode(taker, giver)
            except PrefillFailed as error:
                log.warning("%s", error)

    async def _decode(self, taker: Peer, giver: Peer | None) -> str:
        """Let an engine answer. Raises ``PeerFailed``, and ``PrefillFailed`` where it would wait for nothing."""
        pair = self._fleet.pair(giver, taker) if giver is not None else None
        hints = dict(pair.taker) if pair is not None else {}
        errand: asyncio.Task[None] | None = None
        if giver is not None and pair is not None and self._expects:
            hints |= {"kv_expect": "true", "kv_wait": f"{self._options.prefill_timeout:g}"}
            errand = asyncio.create_task(self._prefill(giver))
        if self._wish.path != EMBEDDINGS:
            self._metrics.paired(pair is not None)
        try:
            async with asyncio.timeout(None) as self._scope:
                with taker.busy(), taker.while_heard(self._scope):
                    if errand is not None:
                        errand.add_done_callback(self._prefill_ended)
                    return await self._pass_on(taker, self._wish.for_decode(hints))
        except TimeoutError as error:
            if self._in_vain:
                words, self._in_vain = self._in_vain, ""
                raise PrefillFailed(words) from error
            raise PeerFailed(taker, f"is not heard of any more: {taker.cause}") from error
        except httpx.HTTPError as error:
            words = words_of(error)
            taker.suspect(words)
            raise PeerFailed(taker, words) from error
        finally:
            if errand is not None:
                errand.cancel()
                await asyncio.gather(errand, return_exceptions=True)  # what came of it was seen above

    def _prefill_ended(self, errand: asyncio.Task[None]) -> None:
        """Whoever waits for a prompt that nobody computes any more is asked anew, unless he answers already."""
        if self._out.started or errand.cancelled() or not isinstance(errand.exception(), PeerFailed):
            return
        self._in_vain = str(errand.exception())
        if self._scope is not None:
            break_off(self._scope)

    def _answers(self) -> None:
        """There is an answer: nothing is to be broken off that was not yet."""
        self._in_vain = ""
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(None)

    async def _pass_on(self, taker: Peer, body: bytes) -> str:
        """Ask, and pass on what comes."""
        url = taker.url + self._wish.path
        async with self._fleet.client.stream("POST", url, content=body, headers=self._headers) as response:
            status = response.status_code
            if response.headers.get("content-type", "").startswith("text/event-stream") and status == 200:
                return await self._stream(taker, response)
            answer = Answer(status, response.headers, await response.aread())
        if (status >= 500 or status in NOT_THE_CLIENTS) and code_of(answer.body) != DEADLINE:
            words = f"answers {status}: {message_of(answer.body)}"
            if not is_busy(status, answer.body):
                taker.suspect(words)
            raise PeerFailed(taker, words, answer)
        taker.failures = 0
        self._answers()
        await self._out.whole(*answer)
        return "answered" if status < 400 else "refused"

    async def _stream(self, taker: Peer, response: httpx.Response) -> str:
        """Pass whole events on, byte for byte. Those that only announce are held until there is something to say."""
        out, splitter, held, last = self._out, Splitter(), b"", b""
        async for piece in response.aiter_raw():
            if not (events := splitter.whole(piece)):
                continue
            last = events.removesuffix(END).rpartition(END)[2]
            if not out.started:
                held += events
                if not self._says_something(taker, events):
                    continue
                self._answers()
                await out.begin(200, response.headers)
                events, held = held, b""
            await out.more(events)
        if not out.started:
            await out.begin(200, response.headers)
        await out.end(held + splitter.rest)
        taker.failures = 0
        if code_of(last) == DEADLINE:
            return "refused"
        return "failed" if error_of(content(last)) is not None else "answered"

    def _says_something(self, taker: Peer, events: bytes) -> bool:
        """Whether there is more than announcements. Raises ``PeerFailed`` where it is an error: another may do it, but
        for the client's own deadline, which is told."""
        for event in each(events):
            said = content(event)
            error = error_of(said)
            if error is not None and code_of(event) != DEADLINE:
                body = msgspec.json.encode({"error": error})
                words = f"fails: {message_of(body)}"
                if code_of(event) == QUEUE:
                    headers = {"content-type": "application/json", "retry-after": str(RETRY_AFTER_SECONDS)}
                    raise PeerFailed(taker, words, Answer(503, headers, body))
                taker.suspect(words)
                raise PeerFailed(taker, words)
            if not is_opening(said):
                return True
        return False

    def _choose(self, side: Side, peers: Sequence[Peer]) -> Peer | None:
        choice = self._chooser.choose(peers, self._wish.chain)
        if choice is None:
            return None
        self._metrics.chose(side, choice.by_prefix)
        return choice.peer
