"""The parts of the proxy that need no engine: index, choice, peers, bodies, events, options."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core import ConfigError, InvalidRequest
from engine.plugins.frontends._errors import HTTPError
from engine.proxy.bodies import RESPONSES, Wish
from engine.proxy.choosing import Chooser
from engine.proxy.events import Splitter, content, error_of, is_opening
from engine.proxy.faults import code_of, message_of
from engine.proxy.fleet import Fleet
from engine.proxy.index import CHUNK, MOST, PrefixIndex, chain_of
from engine.proxy.options import Address, ProxyOptions
from engine.proxy.peers import Card, Peer, handover, reach
from engine.proxy.routes import asked_path

D = (Address("http://d:1"),)
D_TWO = (Address("http://127.0.0.1:2"), Address("http://127.0.0.1:3"))
PATH = "/v1/completions"


def text(*numbers: int) -> bytes:
    """Chunks by number."""
    return b"".join(b"%0*d" % (CHUNK, number) for number in numbers)


# ---- the index


def test_a_chain_tells_beginnings_apart():
    one = chain_of(b"", text(1, 2, 3))
    assert len(one) == 3
    assert chain_of(b"", text(1, 2, 3) + b"rest") == one
    assert chain_of(b"", text(1, 2, 4))[:2] == one[:2]
    assert chain_of(b"", text(1, 2, 4))[2] != one[2]
    assert not set(chain_of(b"", text(9, 2, 3))) & set(one), "each digest is over all before it"
    assert not set(chain_of(b"salt", text(1, 2, 3))) & set(one)
    assert chain_of(b"", text(1)[:-1]) == ()
    assert len(chain_of(b"", bytes(CHUNK * (MOST + 5)))) == MOST


@given(st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=20), st.lists(st.integers(0, 2), max_size=6))
def test_the_longest_beginning_is_found(seen, wanted):
    index = PrefixIndex(10**6)
    for numbers in seen:
        index.record(chain_of(b"", text(*numbers)))
    common = max(
        (next((n for n, (a, b) in enumerate(zip(one, wanted, strict=False)) if a != b), min(len(one), len(wanted)))
         for one in seen),
        default=0,
    )  # fmt: skip
    assert index.match(chain_of(b"", text(*wanted))) == common


@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=30), st.integers(1, 12))
def test_what_is_remembered_is_bounded_and_the_newest(seen, most):
    index = PrefixIndex(most)
    for numbers in seen:
        chain = chain_of(b"", text(*numbers))
        index.record(chain)
        assert len(index) <= most
        assert index.match(chain) == min(len(chain), most), "its beginning is what stays"
    index.clear()
    assert len(index) == 0


# ---- the choice


def peers(count=3, **options):
    told = ProxyOptions(decode=D, **options)
    return Chooser(told), [Peer(Address(f"http://{n}:1"), "prefill", PrefixIndex(1000)) for n in range(count)]


def choose(chooser, some, numbers=()):
    choice = chooser.choose(some, chain_of(b"", text(*numbers)))
    return some.index(choice.peer), choice.by_prefix


def test_who_has_seen_most_of_the_prompt_is_chosen():
    chooser, some = peers()
    assert choose(chooser, some, (1, 2)) == (0, False)
    assert choose(chooser, some, (5, 6)) == (1, False)
    assert choose(chooser, some, (1, 2, 3)) == (0, True)
    assert choose(chooser, some, (5, 6, 7)) == (1, True)
    assert chooser.choose([], ()) is None


def test_a_small_common_beginning_does_not_count():
    chooser, some = peers(match_threshold=0.5)
    assert choose(chooser, some, (1, 2)) == (0, False)
    assert choose(chooser, some, (1, 7, 8, 9)) == (1, False)
    assert choose(chooser, some, (1, 2, 8, 9)) == (0, True)


def test_of_equals_who_has_fewest_open_requests_and_then_whose_turn_it_is():
    chooser, some = peers()
    some[0].open = 2
    assert [choose(chooser, some)[0] for _ in range(3)] == [1, 2, 1]
    for peer in some:
        peer.index.record(chain_of(b"", text(1)))
    some[1].open = some[2].open = 3
    assert choose(chooser, some, (1,)) == (0, True)


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ((7, 3), (0, True)),  # more than twice as many, and 4 more: that is not above 4
        ((8, 3), (1, False)),
        ((18, 10), (0, True)),  # 8 more, but less than twice as many
    ],
)
def test_who_is_far_busier_than_others_is_not_chosen_for_its_prefixes(loads, chosen):
    chooser, some = peers(2, balance_abs=4, balance_rel=2.0)
    choose(chooser, some, (1,))
    some[0].open, some[1].open = loads
    assert choose(chooser, some, (1,)) == chosen


def test_other_policies_do_not_look_at_prefixes():
    chooser, some = peers(2, policy="least-open")
    some[0].open = 1
    assert [choose(chooser, some, (1,)) for _ in range(2)] == [(1, False)] * 2
    chooser, some = peers(2, policy="round-robin")
    some[0].open = 9
    assert [choose(chooser, some, (1,))[0] for _ in range(4)] == [0, 1, 0, 1]


# ---- the engines


def card(incarnation, role="both", fingerprint="f", page_size=16, connectors=None, **about):
    local = {"local": {"address": "127.0.0.1:7001", "role": role, **about}}
    return Card.read({"incarnation": incarnation, "role": role, "model": "m", "fingerprint": fingerprint,
                      "page_size": page_size, "connectors": local if connectors is None else connectors})  # fmt: skip


def peer(url, side, its=None, kv_host=""):
    return Peer(Address(url, kv_host), side, PrefixIndex(9), card=its)


def pair(giver=None, taker=None, *, urls=("http://127.0.0.1:1", "http://127.0.0.1:2"), kv_host="", wanted=""):
    giver = peer(urls[0], "prefill", card("p", "prefill") if giver is None else giver, kv_host)
    return handover(giver, peer(urls[1], "decode", card("d", "decode") if taker is None else taker), wanted)


def test_two_engines_that_fit_are_paired():
    found = pair()
    assert (found.giver, found.taker) == ({"kv_role": "prefill"}, {"kv_from": "127.0.0.1:7001"})
    assert pair(card("p", "both"), card("d", "both")) == found
    assert pair(wanted="local") == found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"taker": card("d", "decode", fingerprint="g")}, "fingerprint is 'f' at http://127.0.0.1:1 and 'g' at http"),
        ({"taker": card("d", "decode", page_size=32)}, "page_size is 16 at http://127.0.0.1:1 and 32 at"),
        ({"taker": card("p", "decode")}, "are the same engine"),
        ({"taker": card("d", "prefill")}, "(takes by: none) have not a connector in common"),
        ({"giver": card("p", "decode")}, "(gives by: none)"),
        ({"giver": card("p", connectors={"host": {}})}, "(gives by: none)"),
        ({"wanted": "nixl"}, "have not connector 'nixl'"),
        ({"giver": card("p", layout="a"), "taker": card("d", layout="b")}, "laid out differently"),
        (
            {"urls": ("http://10.0.0.1:1", "http://10.0.0.2:1")},
            "listens on 127.0.0.1:7001, which http://10.0.0.2:1 cannot reach: start it with --connector.local.host",
        ),
    ],
)
def test_two_that_do_not_fit_are_told_apart_in_words(change, words):
    assert words in pair(**change)


def test_whoever_computes_a_prompt_keeps_it_for_all_that_may_take_it_over():
    """One takes it by ``local``, the other by ``nixl`` alone: neither is named, so that both are kept for."""
    some = {name: {"address": f"127.0.0.1:{port}", "role": "both"} for port, name in enumerate(("local", "nixl"), 7001)}
    fleet = Fleet(ProxyOptions(prefill=(Address("http://127.0.0.1:1"),), decode=D_TWO))
    (giver,), (first, second) = fleet.prefill, fleet.decode
    giver.card, first.card = card("p", connectors=some), card("a", connectors={"local": some["local"]})
    assert fleet.giving(giver) == {}
    fleet._match(first)
    assert fleet.giving(giver) == {"kv_role": "prefill", "kv_with": "local"}
    second.card = card("b", connectors={"nixl": some["nixl"]})
    fleet._match(second)
    assert fleet.giving(giver) == {"kv_role": "prefill"}


def test_an_engine_that_has_not_been_heard_of_is_not_paired():
    silent = peer("http://b:2", "decode")
    assert handover(peer("http://a:1", "prefill", card("p")), silent) == "http://b:2 has not said yet what it is"


def test_with_several_connectors_the_one_is_named():
    two = {name: {"address": f"127.0.0.1:{port}", "role": "both"} for name, port in (("local", 7001), ("nixl", 7002))}
    found = pair(card("p", connectors=two), card("d", connectors=two), wanted="nixl")
    assert found.giver == {"kv_role": "prefill", "kv_with": "nixl"}
    assert found.taker == {"kv_from": "nixl://127.0.0.1:7002"}
    assert pair(card("p"), card("d", connectors=two)).taker == {"kv_from": "local://127.0.0.1:7001"}


@pytest.mark.parametrize(
    ("address", "url", "kv_host", "reached"),
    [
        ("0.0.0.0:7001", "http://node-1:8001", "", "node-1:7001"),
        ("[::]:7001", "http://[fd00::1]:8001", "", "[fd00::1]:7001"),
        ("10.1.1.1:7001", "http://node-1:8001", "", "10.1.1.1:7001"),
        ("127.0.0.1:7001", "http://node-1:8001", "10.9.9.9", "10.9.9.9:7001"),
        ("[::1]:7001", "http://localhost:8001", "", "[::1]:7001"),
    ],
)
def test_a_connector_is_reached_where_others_can(address, url, kv_host, reached):
    assert reach(address, Address(url, kv_host)) == reached


def test_an_engine_on_another_host_is_reached_at_the_host_that_is_said():
    urls = ("http://10.0.0.1:1", "http://10.0.0.2:1")
    assert pair(urls=urls, kv_host="192.168.0.1").taker == {"kv_from": "192.168.0.1:7001"}
    everywhere = card("p", connectors={"local": {"address": "0.0.0.0:7001", "role": "prefill"}})
    assert pair(everywhere, urls=urls).taker == {"kv_from": "10.0.0.1:7001"}
    assert pair(urls=("http://10.0.0.1:1", "http://10.0.0.1:2")).taker == {"kv_from": "127.0.0.1:7001"}


def test_a_restart_and_new_weights_empty_what_is_known():
    one = peer("http://a:1", "prefill", card("p"))
    for its, another in ((card("p"), False), (card("q"), True), (card("q", fingerprint="g"), False)):
        one.index.record(chain_of(b"", text(1)))
        before = one.card
        assert one.heard(its) == another
        assert (len(one.index) == 0) == (before != its)


@pytest.mark.parametrize("said", [{}, {"connectors": None}, [], None, {"connectors": {}, "incarnation": "x"}])
def test_what_is_no_card_is_refused(said):
    with pytest.raises(ValueError, match="it does not say what it is"):
        Card.read(said)


async def waits(one):
    async with asyncio.timeout(None) as scope:
        with one.while_heard(scope):
            one.gone("it is silent")
            await asyncio.sleep(60)


def test_whoever_waits_for_an_engine_that_is_gone_is_told():
    async def scene():
        one = peer("http://a:1", "decode", card("p"))
        with pytest.raises(TimeoutError):
            await waits(one)
        async with asyncio.timeout(None) as ended:
            one._scopes.add(ended)
        one.gone("again")  # nobody waits any more: nothing is raised

    asyncio.run(scene())


# ---- bodies


BODY = {"prompt": "x" * 300, "max_tokens": 9, "min_tokens": 3, "n": 2, "stream": True, "seed": 1,
        "stream_options": {"include_usage": True}, "metadata": {"team": "a"}}  # fmt: skip


def test_a_prompt_is_sent_for_one_token_and_its_continuation_as_it_came():
    wish = Wish.parse(PATH, json.dumps(BODY).encode())
    assert json.loads(wish.for_prefill({"kv_role": "prefill"})) == {
        "prompt": "x" * 300, "max_tokens": 1, "n": 1, "stream": False, "seed": 1,
        "metadata": {"team": "a", "kv_role": "prefill"},
    }  # fmt: skip
    assert json.loads(wish.for_decode({"kv_from": "h:1"})) == {**BODY, "metadata": {"team": "a", "kv_from": "h:1"}}
    assert wish.for_decode({}) == json.dumps(BODY).encode()
    assert len(wish.chain) == 2


def test_numbers_and_texts_stay_as_they_were_written():
    body = b'{"prompt": "\\u00e4\\ud83d\\ude00 ", "temperature": 1.0000000000000000001, "x": 1e400, "max_tokens": 3}'
    sent = Wish.parse(PATH, body).for_decode({"kv_from": "h:1"})
    for part in (b'"\\u00e4\\ud83d\\ude00 "', b"1.0000000000000000001", b"1e400"):
        assert part in sent


def test_the_older_name_of_a_length_does_not_stay_beside_the_newer():
    wish = Wish.parse("/v1/chat/completions", b'{"messages": [], "max_completion_tokens": 7, "metadata": null}')
    assert json.loads(wish.for_prefill({})) == {
        "messages": [], "max_tokens": 1, "n": 1, "stream": False, "metadata": {},
    }  # fmt: skip


def test_a_conversation_that_goes_on_has_the_same_beginning():
    turns = [{"role": "user", "content": "x" * 400}, {"role": "assistant", "content": "y" * 400}]
    chains = [Wish.parse("/v1/chat/completions", json.dumps({"messages": turns[:n]}).encode()).chain for n in (1, 2)]
    assert chains[1][:3] == chains[0][:3]
    salted = Wish.parse("/v1/chat/completions", json.dumps({"messages": turns, "cache_salt": "s"}).encode())
    assert salted.chain[0] != chains[1][0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"{", "body"),
        (b"[1]", "body"),
        (b'{"prompt": [1,}', "body"),
        (b"\xff", "body"),
        (b'{"metadata": 3}', "metadata"),
        (b'{"metadata": ["kv_from"]}', "metadata"),
        (b'{"metadata": {"a": "b", "kv_from": "h:1"}}', "metadata.kv_from"),
        (b'{"metadata": {"kv_role": "prefill"}}', "metadata.kv_role"),
        (b'{"metadata": {}, "metadata": {"kv_anything": "1"}}', "metadata.kv_anything"),
    ],
)
def test_what_the_proxy_refuses(body, field):
    with pytest.raises(InvalidRequest) as told:
        Wish.parse(PATH, body)
    assert told.value.field == field


# ---- events


@given(st.lists(st.binary(max_size=8).map(lambda part: part.replace(b"a", b"\n")), max_size=30))
def test_events_are_passed_on_whole_and_nothing_is_lost(pieces):
    splitter = Splitter()
    passed = [splitter.whole(piece) for piece in pieces]
    assert b"".join(passed) + splitter.rest == b"".join(pieces)
    assert all(part.endswith(b"\n\n") for part in passed if part)
    assert b"\n\n" not in splitter.rest


@pytest.mark.parametrize(
    ("said", "opening"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, True),
        ({"choices": [{"delta": {"role": "assistant"}}, {"delta": {"role": "assistant", "content": ""}}]}, True),
        ({"choices": [{"delta": {"role": "assistant", "content": "x"}}]}, False),
        ({"choices": [{"delta": {"role": "assistant"}, "finish_reason": "stop"}]}, False),
        ({"choices": [{"delta": {}, "finish_reason": None}]}, False),
        ({"choices": [{"text": ""}]}, False),
        ({"choices": []}, False),
        ({"error": {}}, False),
        ({}, False),
    ],
)
def test_an_event_that_only_announces(said, opening):
    assert is_opening(content(b"data: " + msgspec.json.encode(said) + b"\n\n")) == opening


def test_events_of_responses_have_names():
    created = b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
    assert is_opening(content(created))
    assert error_of(content(created)) is None
    failure = b'event: error\ndata: {"type":"error","code":"queue_timeout","message":"a\\nb","param":null}\n\n'
    assert (code_of(failure), message_of(failure)) == ("queue_timeout", "a b")
    assert not is_opening(content(failure))
    last = b'event: response.failed\ndata: {"type":"response.failed","response":{"error":{"code":"server_error"}}}\n\n'
    assert error_of(content(last)) == {"code": "server_error"}
    done = b'event: response.completed\ndata: {"type":"response.completed","response":{"error":null}}\n\n'
    assert error_of(content(done)) is None
    assert (error_of({"error": None}), error_of({"error": {"code": "x"}})) == (None, {"code": "x"})


def test_what_an_engine_for_prompts_is_asked():
    wish = Wish.parse(RESPONSES, b'{"input": "ab", "max_output_tokens": 9, "stream": true, "stream_options": {}}')
    asked = json.loads(wish.for_prefill({"kv_a": "1"}))
    assert asked == {"input": "ab", "max_output_tokens": 1, "stream": False, "metadata": {"kv_a": "1"}}
    one, other = (
        Wish.parse(RESPONSES, json.dumps({"input": "x" * 9000, "instructions": words}).encode()) for words in ("a", "b")
    )
    assert one.chain
    assert not set(one.chain) & set(other.chain), "instructions come before the input"


def test_an_event_without_an_object():
    assert content(b"data: [DONE]\n\n") == content(b": comment\n\n") == content(b"data: \xff") == {}


# ---- options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decode": ()}, "name at least one with --decode"),
        ({"decode": D * 2}, "--decode http://d:1 is given twice"),
        ({"prefill_required": True}, "no engine is named with --prefill"),
        ({"style": "vlm"}, "--style 'vlm': one of vllm, sglang"),
        ({"policy": "random"}, "--policy 'random': one of cache-aware"),
        ({"api_key": " "}, "--api-key is empty"),
        ({"backend_api_key": "ä"}, "--backend-api-key is empty or no header"),
        ({"retries": -1}, "--retries -1: must be at least 0"),
        ({"poll": 0.0}, "--poll 0.0: must be above 0"),
        ({"peer_timeout": float("nan")}, "--peer-timeout nan: must be above 0"),
        ({"match_threshold": 1.5}, "at most 1"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(ConfigError) as told:
        ProxyOptions(**{"decode": D, **options})
    assert words in str(told.value)


@pytest.mark.parametrize(
    ("given_", "address"),
    [
        ("http://h:1", Address("http://h:1")),
        ("https://[::1]:2/", Address("https://[::1]:2")),
        ("http://h:1, kv_host=10.0.0.1", Address("http://h:1", "10.0.0.1")),
        ("http://h:1,kv-host=[::1]", Address("http://h:1", "::1")),
    ],
)
def test_addresses(given_, address):
    assert Address.parse(given_, "--prefill") == address


@pytest.mark.parametrize("wrong", ["h:1", "http://", "http://h:x", "http://h:99999", "ftp://h:1", "http://h:1,x=2",
                                   "http://h:1,kv_host=", "http://h:1?x"])  # fmt: skip
def test_what_is_no_address(wrong):
    with pytest.raises(ConfigError, match="--decode: "):
        Address.parse(wrong, "--decode")


@pytest.mark.parametrize("name", ["sim", "org/model", "a b", "50%", "a?x=1", "a#b", "..a", "%2e%2e/engine", "ü"])
def test_a_model_is_asked_for_by_its_name_and_nothing_else(name):
    url = httpx.URL("http://e:1" + asked_path(f"/v1/models/{name}"))
    assert (url.path, url.query, url.fragment) == (f"/v1/models/{name}", b"", "")


@pytest.mark.parametrize("name", ["../engine", "../../metrics", "x/../../cache/events", "./../engine", ".."])
def test_with_the_proxys_key_nobody_gets_at_what_else_engines_answer(name):
    with pytest.raises(HTTPError, match="no model") as refused:
        asked_path(f"/v1/models/{name}")
    assert refused.value.status == 404
