"""The radix tree against a model of plain lists, its order of eviction, and what it costs in nodes."""

from __future__ import annotations

import random
import sys

import pytest

from engine.core.identity import namespace_digest, pack
from engine.plugins.kvcache._radix_node import STRATEGIES, Node, path
from engine.plugins.kvcache._radix_tree import RadixTree

NAMESPACES = [namespace_digest("", "", salt) for salt in ("", "a")]


def key_of(node: Node) -> tuple[bytes, bytes]:
    """The namespace and the whole key from the root down to the end of a node."""
    way = list(path(node))
    return (way[-1].namespace if way else b"", b"".join(passed.key for passed in reversed(way)))


def common_pages(one: bytes, other: bytes, size: int) -> int:
    pages = 0
    while (pages + 1) * size * 4 <= min(len(one), len(other)) and (
        one[pages * size * 4 : (pages + 1) * size * 4] == other[pages * size * 4 : (pages + 1) * size * 4]
    ):
        pages += 1
    return pages


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 3, 16])
def test_random_operations_against_a_model(size, strategy):
    """Case B17, at the tree: whatever is done in whatever order, sizes, pins and prefixes are exact."""
    rng = random.Random(f"{size} {strategy}")
    tree = RadixTree(size, strategy)
    pinned: list[Node] = []
    fresh = 0
    for turn in range(2500):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9) * size + rng.randrange(size))]
        key, namespace = pack(tokens), rng.choice(NAMESPACES)
        action = rng.random()
        stored = [whole for space, whole in map(key_of, tree.nodes()) if space == namespace]
        known = max((common_pages(key, whole, size) for whole in stored), default=0)
        if action < 0.35:
            pages = list(range(fresh, fresh + len(tokens) // size))
            fresh += len(pages)
            node, have = tree.insert(key, namespace, pages, priority=rng.randrange(3), chunked=rng.random() < 0.2)
            assert have == known
            assert len(tree.pages(node)) == len(pages)
            assert tree.pages(node)[have:] == pages[have:]
        elif action < 0.6:
            limit = rng.randrange(9) if rng.random() < 0.5 else None
            node, length = tree.match(key, namespace, limit)
            assert length == (known if limit is None else min(known, limit))
            assert len(tree.pages(node)) == length
            assert tree.idle(node) == sum(len(n.pages) for n in path(node) if not n.locks)
            if rng.random() < 0.3:
                assert tree.lock(node) == -sum(len(n.pages) for n in path(node) if n.locks == 1)
                pinned.append(node)
        elif action < 0.75 and pinned:
            tree.unlock(pinned.pop(rng.randrange(len(pinned))))
        else:
            evict_and_compare(tree, strategy, rng.randrange(1, 12))
        if turn % 10 == 0:
            locks: dict[Node, int] = {}
            for node in (passed for held in pinned for passed in path(held)):
                locks[node] = locks.get(node, 0) + 1
            tree.check(locks)
    for node in pinned:
        tree.unlock(node)
    evict_and_compare(tree, strategy, 10**6)
    assert (tree.count, tree.evictable, tree.protected) == (0, 0, 0)


def evict_and_compare(tree: RadixTree, strategy: str, need: int) -> None:
    """The incremental order gives what sorting all leaves anew for every victim gives."""
    expected = min(need, tree.evictable)
    freed = 0
    for node in tree.victims(need):
        assert node is min(tree.leaves(), key=STRATEGIES[strategy])
        assert freed < need
        assert tree.remove(node)
        freed += len(node.pages)
    assert freed >= expected


def test_a_node_is_not_evicted_while_pinned_or_above_others():
    tree = RadixTree(1)
    upper, _ = tree.insert(pack([1, 2]), b"", [0, 1])
    lower, _ = tree.insert(pack([1, 2, 3]), b"", [0, 1, 2])
    assert not tree.remove(upper)
    tree.lock(lower)
    assert not tree.remove(lower)
    assert tree.victims(9) == []
    tree.unlock(lower)
    assert tree.victims(9) == [lower, upper]
    assert tree.remove(lower)
    assert not tree.remove(lower), "once is enough"


def build(nodes: int) -> RadixTree:
    rng = random.Random(3)
    tree = RadixTree(1)
    families = [[rng.randrange(50_000) for _ in range(8)] for _ in range(50)]
    page = 0
    while tree.count < nodes:
        tokens = families[rng.randrange(50)][: rng.randrange(1, 9)] + [rng.randrange(50_000) for _ in range(10)]
        tree.insert(pack(tokens), b"", range(page, page + len(tokens)))
        page += len(tokens)
    return tree


def test_bytes_of_a_node_and_entries_of_the_order_are_bounded():
    tree = build(20_000)
    counted = 0
    for node in tree.nodes():
        counted += sum(map(sys.getsizeof, (node, node.key, node.pages)))
        counted += sys.getsizeof(node.children) if node.children else 0
    assert counted / tree.count < 600
    for _ in range(3):
        for node in list(tree.nodes())[:5000]:
            tree.lock(node)
            tree.unlock(node)
    assert len(tree._heap) <= 2 * tree.count + 100


@pytest.mark.parametrize("strategy", ["lru", "mru"])
@pytest.mark.parametrize("size", [1, 4])
def test_an_earlier_answer_shortens_the_search_and_changes_nothing(size, strategy):
    """Twins, one of which is told what the last look-up of the same sequence found: they stay equal in all."""
    rng = random.Random(f"known {size} {strategy}")
    plain, told = RadixTree(size, strategy), RadixTree(size, strategy)
    sequences = [[rng.randrange(2) for _ in range(rng.randrange(1, 5) * size)] for _ in range(8)]
    found: list[tuple[Node, int] | None] = [None] * len(sequences)
    resumed = 0
    for _ in range(3000):
        number, action = rng.randrange(len(sequences)), rng.random()
        key = pack(sequences[number])
        if action < 0.2:
            pages = list(range(len(sequences[number]) // size))
            assert plain.insert(key, b"", pages)[1] == told.insert(key, b"", pages)[1]
        elif action < 0.7:
            limit = rng.choice([None, len(sequences[number]) // size - 1])
            earlier = found[number]
            resumed += earlier is not None and earlier[0].parent is not None
            _, length = plain.match(key, b"", limit)
            found[number] = told.match(key, b"", limit, earlier)
            assert found[number][1] == length
        elif action < 0.8:
            sequences[number] += [rng.randrange(2) for _ in range(size)]  # it generated: the old answer still holds
        elif action < 0.9:
            sequences[number] = sequences[number][: 2 * size]
            found[number] = None
        else:
            for tree in (plain, told):
                for node in tree.victims(3):
                    tree.remove(node)
        shapes = [[(*key_of(node), node.used, node.created) for node in tree.nodes()] for tree in (plain, told)]
        assert shapes[0] == shapes[1]
        assert [key_of(leaf) for leaf in plain.leaves()] == [key_of(leaf) for leaf in told.leaves()]
    assert resumed > 100
    told.check({})
