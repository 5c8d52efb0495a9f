"""Level radix: operations on the radix tree, alone (``basic``, ``isolation``, ``random``) or with pool and requests.

Recorded counts are in tokens, recorded slots count from one page on; pages are compared up to renaming where ours are
handed out by the pool. The tree is reached as the ``radix`` cache's attribute ``tree``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.core.identity import pack
from engine.core.pages import PagePool
from engine.core.protocols import Context, Limits, ModelInfo
from engine.core.registry import make
from engine.core.replay.cores import ANY_TOKEN
from engine.core.replay.report import Divergence, Report
from engine.core.replay.sglang_model import UNBOUNDED, namespace, slots
from engine.core.request import Request, SamplingParams

Trace = Mapping[str, Any]


def replay(data: Trace) -> Report:
    """Do the operations anew and compare each result; stops at the first difference."""
    ops = data["ops"]
    with_requests = any(op["op"] in ("prefill", "finish") for op in ops)
    player: Requests | Tree = Requests(data["config"]) if with_requests else Tree(data["config"])
    for number, op in enumerate(ops):
        decided = player.play(op)
        recorded = op["result"]
        decided = {name: decided[name] for name in recorded}  # the shape is recorded where it changed
        if decided != recorded:
            about = {name: value for name, value in op.items() if name != "result"}
            return Report(data["name"], number, Divergence(number, {**about, **recorded}, {**about, **decided}))
    return Report(data["name"], len(ops))


def make_cache(config: Trace, pool: PagePool) -> Any:
    """A ``radix`` cache over a pool, as the recording configures it."""
    cache = make("kvcache", "radix", {"eviction_policy": config["eviction_policy"]})
    limits = Limits(
        max_model_len=UNBOUNDED,
        max_batch_tokens=UNBOUNDED,
        max_running=UNBOUNDED,
        page_size=pool.page_size,
        num_pages=pool.num_pages,
        vocab_size=ANY_TOKEN,
    )
    model = ModelInfo(name="recorded", vocab_size=ANY_TOKEN, max_model_len=UNBOUNDED)
    cache.start(Context(limits=limits, pool=pool, model=model))
    return cache


def shape(tree: Any, size: int, rename: Mapping[int, int] | None = None) -> list[list[int]]:
    """Every node, parents first: start, length, pins, hits, priority, first slot, children."""
    found = []
    starts = {tree.root: 0}
    for node in tree.nodes():
        start = starts[node.parent]
        length = len(node.pages) * size
        starts[node] = start + length
        first = node.pages[0] if rename is None else rename[node.pages[0]]
        found.append([start, length, node.locks, node.hits, node.priority, first * size, len(node.children)])
    return found


class Tree:
    """Plays operations on the tree alone."""

    def __init__(self, config: Trace) -> None:
        self.size = config["page_size"]
        self.tree = make_cache(config, PagePool(1, self.size)).tree
        self.handles: list[Any] = []

    def play(self, op: Trace) -> dict[str, Any]:
        """One operation; what came of it, in the recording's terms."""
        before = self.tree.count
        handle, result = getattr(self, op["op"])(op)
        self.handles.append(handle)
        return {
            **result,
            "node_delta": self.tree.count - before,
            "evictable": self.tree.evictable * self.size,
            "protected": self.tree.protected * self.size,
            "total": (self.tree.evictable + self.tree.protected) * self.size,
            "shape": shape(self.tree, self.size),
        }

    def match(self, op: Trace) -> tuple[Any, dict[str, Any]]:
        """Look up."""
        limit = op["limit"] // self.size if "limit" in op else None
        node, pages = self.tree.match(pack(op["key"]), namespace(op), limit)
        return node, {"matched": pages * self.size, "slots": slots(self.tree.pages(node), self.size)}

    def insert(self, op: Trace) -> tuple[Any, dict[str, Any]]:
        """Insert with the recorded slots."""
        size = self.size
        pages = [slot // size for slot in op["value"][: len(op["key"]) // size * size : size]]
        priority, chunked = op.get("priority") or 0, bool(op.get("chunked"))
        node, have = self.tree.insert(pack(op["key"]), namespace(op), pages, priority=priority, chunked=chunked)
        return node, {"prefix_len": have * size}

    def lock(self, op: Trace) -> tuple[Any, dict[str, Any]]:
        """Pin the path that an earlier match found."""
        return None, {"delta": self.tree.lock(self.handles[op["ref"]]) * self.size}

    def unlock(self, op: Trace) -> tuple[Any, dict[str, Any]]:
        """Unpin it."""
        return None, {"delta": self.tree.unlock(self.handles[op["ref"]]) * self.size}

    def evict(self, op: Trace) -> tuple[Any, dict[str, Any]]:
        """Give up whole leaves."""
        victims = self.tree.victims(-(-op["n"] // self.size))
        freed = [slots(node.pages, self.size) for node in victims if self.tree.remove(node)]
        return None, {"freed": freed, "num_evicted": sum(map(len, freed))}


class Requests:
    """Plays requests on the cache and its pool, through the methods that the core calls."""

    def __init__(self, config: Trace) -> None:
        self.size = config["page_size"]
        self.pool = PagePool(config["pool_size"] // self.size, self.size)
        self.cache = make_cache(config, self.pool)
        self.requests: dict[str, Request] = {}
        self.theirs: dict[int, int] = {}  # our page -> the recorded one that was allocated in its place

    def play(self, op: Trace) -> dict[str, Any]:
        """One operation; what came of it, in the recording's terms."""
        held = self.pool.held
        taken: list[int] = []
        result = getattr(self, op["op"])(op, taken)
        recorded = op["result"]["allocated"]
        if len(recorded) == len(taken):
            self.theirs.update(zip(taken, recorded, strict=True))
        allocated = [self.theirs.get(page, -1) for page in taken]
        freed = sorted(self.theirs[page] for page in held - self.pool.held)
        tree, size = self.cache.tree, self.size
        request = self.requests.get(op.get("id", ""))
        row = slots([self.theirs[page] for page in request.pages], size)[: request.computed] if request else []
        return {
            **result,
            "allocated": allocated,
            "freed": freed,
            "row": row,
            "kv_committed": request.computed if request else 0,
            "available": self.pool.num_free * size,
            "evictable": tree.evictable * size,
            "protected": tree.protected * size,
            "total": (tree.evictable + tree.protected) * size,
            "shape": shape(tree, size, self.theirs),
        }

    def prefill(self, op: Trace, taken: list[int]) -> dict[str, Any]:
        """Match, pin, allocate; ``chunk`` bounds the tokens computed, ``continue_chunk`` goes on."""
        if op.get("continue_chunk"):
            request = self.requests[op["id"]]
        else:
            request = self.requests[op["id"]] = self._new(op)
            match = self.cache.match(request)
            request.pages = self.cache.adopt(request, match)
            request.computed = match.tokens
        start = request.computed
        end = min(request.num_tokens, start + op.get("chunk", UNBOUNDED))
        self._reach(request, end, taken)
        return {"prefix_len": start, "extend": [start, end]}

    def cache_unfinished(self, op: Trace, taken: list[int]) -> dict[str, Any]:
        """What was computed becomes matchable; then the first token is sampled, if the prompt is complete."""
        request = self.requests[op["id"]]
        pages = self.cache.publish(request, request.computed).pages
        if pages is not None:
            request.pages = pages
        request.tokens += [op["token"]] if "token" in op else []
        return {
            "protected_len": request.kv_state.pages * self.size,
            "prefix_indices_len": request.computed,
        }

    def decode(self, op: Trace, taken: list[int]) -> dict[str, Any]:
        """Compute the last token, sample the next."""
        request = self.requests[op["id"]]
        self._reach(request, request.num_tokens, taken)
        request.tokens.append(op["token"])
        return {}

    def finish(self, op: Trace, taken: list[int]) -> dict[str, Any]:
        """Let go of everything; what was computed stays cached, unless it is a retraction."""
        request = self.requests.pop(op["id"])
        self.cache.release(request, keep=request.computed if op.get("is_insert", True) else 0)
        return {}

    def evict(self, op: Trace, taken: list[int]) -> dict[str, Any]:
        """Give up whole leaves."""
        need = -(-op["n"] // self.size)
        self.cache.drop(self.cache.victims(need), need)
        return {}

    def _new(self, op: Trace) -> Request:
        prompt = op["prompt"]
        return Request(
            id=op["id"],
            tokens=list(prompt),
            num_prompt=len(prompt),
            params=SamplingParams(),
            max_total=UNBOUNDED,
            namespace=namespace(op),
            prefill_target=len(prompt),
        )

    def _reach(self, request: Request, upto: int, taken: list[int]) -> None:
        pages = self.cache.take(request, self.cache.short(request, upto))
        request.pages.extend(pages)
        taken += pages
        request.computed = upto
