"""Both radix trees, queue orders and admissions behind one face. What is timed here is what stands under ``timed``."""

from __future__ import annotations

import tracemalloc
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import _sglang_peer
from _sides import MAX_MODEL_LEN, Stopwatch

from engine.core import EngineConfig, SamplingParams
from engine.core.assemble import assemble
from engine.core.identity import namespace_digest, pack
from engine.core.step import Step
from engine.plugins.kvcache._radix_tree import RadixTree

Tokens = Sequence[int]
MAX_TOKENS = 64


class RadixSide(ABC):
    """A tree with its pool, a queue, and its order.

    Args:
        page_size: tokens a page.
        pages: pages in the pool.
        policy: the order of the queue.
    """

    name: str

    @abstractmethod
    def __init__(self, page_size: int, pages: int, policy: str = "fcfs") -> None: ...

    @abstractmethod
    def key(self, tokens: Tokens) -> Any:
        """Tokens as the side keeps those of a request."""

    @abstractmethod
    def remember(self, key: Any) -> Any:
        """Insert a key on slots of the pool, untimed."""

    def fill(self, keys: Iterable[Tokens]) -> None:
        """Insert many keys, untimed."""
        for tokens in keys:
            self.remember(self.key(tokens))

    @property
    @abstractmethod
    def free(self) -> int:
        """Free slots of the pool, in tokens."""

    @abstractmethod
    def match(self, key: Any) -> Any:
        """Timed: the longest cached prefix. Theirs gathers its slots in passing; ours names the node."""

    def match_with_pages(self, key: Any) -> Any:
        """Timed: the same, and its pages."""
        return self.match(key)

    @abstractmethod
    def insert(self, key: Any, watch: Stopwatch) -> None:
        """Timed: insert a key whose slots are at hand. The new leaf is taken out again."""

    @abstractmethod
    def evict(self, tokens: int) -> None:
        """Timed: evict so many tokens, and return their slots to the pool."""

    @abstractmethod
    def enqueue(self, prompts: Sequence[Tokens]) -> None:
        """New requests of these prompts wait, and nobody else."""

    @abstractmethod
    def order(self, watch: Stopwatch) -> None:
        """Timed: put the waiting ones in order."""

    @abstractmethod
    def admit(self, watch: Stopwatch) -> int:
        """Timed: let all that wait into one prefill batch; returns how many. They leave again, untimed."""

    @staticmethod
    @abstractmethod
    def tree_of(keys: Callable[[], Sequence[Tokens]], page_size: int) -> tuple[float, int]:
        """Bytes a node of a tree of these keys (made when asked), and the number of nodes."""


class Ours(RadixSide):
    """``radix`` and ``radix`` in an engine core whose model costs nothing."""

    name = "ours"

    def __init__(self, page_size: int, pages: int, policy: str = "fcfs") -> None:
        options = {"policy": policy, "chunked_prefill_size": -1, "max_prefill_tokens": 10**7}
        self._core: Any = assemble(
            EngineConfig(
                executor={"name": "sim", "max_model_len": MAX_MODEL_LEN},
                scheduler={"name": "radix", **options},
                kvcache="radix",
                page_size=page_size,
                max_running=1024,
                max_batch_tokens=10**7,
                num_pages=pages,
                max_waiting=1000,
            )
        )
        self._tree = self._core.kv.tree
        self._page = page_size
        self._namespace = namespace_digest("", "", "")
        self._steps = 0
        self._names: list[str] = []

    def key(self, tokens: Tokens) -> bytes:
        return pack(tokens)

    def remember(self, key: bytes) -> Any:
        pages = self._core.pool.take(len(key) // (4 * self._page))
        node, have = self._tree.insert(key, self._namespace, pages)
        self._core.pool.give(pages[:have])
        return node

    @property
    def free(self) -> int:
        return self._core.pool.num_free * self._page

    def match(self, key: bytes) -> Any:
        return self._tree.match(key, self._namespace)

    def match_with_pages(self, key: bytes) -> Any:
        tree = self._tree
        return tree.pages(tree.match(key, self._namespace)[0])

    def insert(self, key: bytes, watch: Stopwatch) -> None:
        pages = self._core.pool.take(len(key) // (4 * self._page))
        clock = watch.clock
        start = clock()
        node, _ = self._tree.insert(key, self._namespace, pages)
        watch.plan += clock() - start - watch.cost
        self._tree.remove(node)
        self._core.pool.give(pages)

    def evict(self, tokens: int) -> None:
        kv, pages = self._core.kv, -(-tokens // self._page)
        kv.drop(kv.victims(pages), pages)

    def enqueue(self, prompts: Sequence[Tokens]) -> None:
        core = self._core
        for name in self._names:
            core.abort(name)
        core.take_deltas()
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=0)
        self._names = [core.add(prompt, params).id for prompt in prompts]

    def order(self, watch: Stopwatch) -> None:
        step = self._step()
        waiting = step._core.waiting.window(10**6)
        queue_order, clock = self._core.scheduler.queue_order, watch.clock
        start = clock()
        queue_order.order(step, waiting)
        watch.plan += clock() - start - watch.cost

    def admit(self, watch: Stopwatch) -> int:
        scheduler, step, clock = self._core.scheduler, self._step(), watch.clock
        ledger = scheduler._open(step)
        start = clock()
        scheduler._admit(step, ledger)
        watch.plan += clock() - start - watch.cost
        scheduler.full = False
        return len(ledger.joined)

    def _step(self) -> Step:
        self._steps += 1
        self._core.arbiter.forget_step()
        return Step(self._core, self._steps)

    @staticmethod
    def tree_of(keys: Callable[[], Sequence[Tokens]], page_size: int) -> tuple[float, int]:
        total = sum(len(tokens) // page_size for tokens in keys())
        numbers = list(range(1000, 1000 + total))  # they exist once, whoever lists them
        tracemalloc.start()
        tree, at = RadixTree(page_size), 0
        for tokens in keys():
            need = len(tokens) // page_size
            tree.insert(pack(tokens), b"", numbers[at : at + need])
            at += need
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return size / tree.count, tree.count


class Sglang(RadixSide):
    """The real classes."""

    name = "sglang"

    def __init__(self, page_size: int, pages: int, policy: str = "fcfs") -> None:
        self._known = _sglang_peer.classes()
        self._page = page_size
        self._tree, self._allocator = _sglang_peer.make_cache(page_size, pages)
        self._policy = _sglang_peer.make_policy(policy, self._tree)
        self._waiting: list[Any] = []

    def key(self, tokens: Tokens) -> array[int]:
        return array("q", tokens)

    def remember(self, key: array[int]) -> Any:
        slots = self._allocator.alloc(len(key))
        known = self._known
        done = self._tree.insert(known.InsertParams(key=known.RadixKey(key), value=slots))
        if done.prefix_len:
            self._allocator.free(slots[: done.prefix_len])
        return done.last_device_node

    def fill(self, keys: Iterable[Tokens]) -> None:
        """Freeing copies the list of all free slots: here it is done for many keys at once."""
        for number, tokens in enumerate(keys):
            if not number % 64:
                if number:
                    self._allocator.free_group_end()
                self._allocator.free_group_begin()
            self.remember(self.key(tokens))
        self._allocator.free_group_end()

    @property
    def free(self) -> int:
        return self._allocator.available_size()

    def match(self, key: array[int]) -> Any:
        known = self._known
        return self._tree.match_prefix(known.MatchPrefixParams(key=known.RadixKey(key)))

    def insert(self, key: array[int], watch: Stopwatch) -> None:
        known, tree, clock = self._known, self._tree, watch.clock
        slots = self._allocator.alloc(len(key))
        start = clock()
        done = tree.insert(known.InsertParams(key=known.RadixKey(key), value=slots))
        watch.plan += clock() - start - watch.cost
        tree._delete_leaf(done.last_device_node)
        self._allocator.free(slots)

    def evict(self, tokens: int) -> None:
        self._tree.evict(self._known.EvictParams(num_tokens=tokens))

    def enqueue(self, prompts: Sequence[Tokens]) -> None:
        make = _sglang_peer.make_request
        self._waiting = [make(f"r{number}", prompt, MAX_TOKENS) for number, prompt in enumerate(prompts)]

    def order(self, watch: Stopwatch) -> None:
        waiting, clock = list(self._waiting), watch.clock
        start = clock()
        self._policy.calc_priority(waiting)
        watch.plan += clock() - start - watch.cost

    def admit(self, watch: Stopwatch) -> int:
        tree, waiting, clock = self._tree, self._waiting, watch.clock
        adder = _sglang_peer.make_adder(self._page, tree, self._allocator, 10**7)
        go_on = self._known.AddReqResult.CONTINUE
        start = clock()
        for request in waiting:
            request.init_next_round_input(tree)
            if adder.add_one_req(request, False, None) is not go_on:
                break
        watch.plan += clock() - start - watch.cost
        for request in adder.can_run_list:
            tree.dec_lock_ref(request.last_node)
        return len(adder.can_run_list)

    @staticmethod
    def tree_of(keys: Callable[[], Sequence[Tokens]], page_size: int) -> tuple[float, int]:
        known = _sglang_peer.classes()
        tracemalloc.start()
        tree, slot = known.RadixCache.create_simulated(page_size=page_size), 1000
        for tokens in keys():
            value = known.torch.arange(slot, slot + len(tokens), dtype=known.torch.int64)
            tree.insert(known.InsertParams(key=known.RadixKey(array("q", tokens)), value=value))
            slot += len(tokens)
        size = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        nodes, stack = -1, [tree.root_node]
        while stack:
            node = stack.pop()
            nodes += 1
            size += len(node.value) * 8  # slots lie in memory that is not traced
            stack.extend(node.children.values())
        return size / nodes, nodes
