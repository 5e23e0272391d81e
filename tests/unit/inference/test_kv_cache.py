"""Tests page allocation, streams of rows, and the prefix cache."""

import pytest
import torch

from adaponder.inference.kv_cache import Pages, PrefixCache, RowStream, Span


def test_pages_are_taken_once_and_page_0_never():
    pages = Pages(5, 4)
    taken = pages.take(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert (pages.free, pages.held, pages.take(1), pages.take(0)) == (0, 4, None, [])
    pages.release(taken[:2])
    assert (pages.take(3), pages.free) == (None, 2)
    pages.hold(taken[2:])
    pages.free_all()
    assert (pages.free, pages.held, sorted(pages.take(3))) == (4, 0, [1, 2, 3])


def test_a_page_is_free_once_its_last_holder_releases_it():
    pages = Pages(3, 4)
    (page,) = pages.take(1)
    pages.hold([page])
    for holders, free in ((2, 1), (1, 1), (0, 2)):
        assert (pages._holders[page], pages.free) == (holders, free)
        if holders:
            pages.release([page])
    for refused in (pages.release, pages.hold):
        with pytest.raises(RuntimeError, match=f"page {page}"):
            refused([page])
    assert pages.free == 2


def test_a_stream_returns_the_rows_of_its_pages_in_order():
    stream = RowStream(4)
    assert (stream.pages_for(0), stream.pages_for(9)) == (0, 3)
    stream.pages += [5, 2]
    assert stream.take(3) == [20, 21, 22]
    assert (stream.room, stream.pages_for(5), stream.pages_for(6)) == (5, 0, 1)
    assert stream.take(3) == [23, 8, 9]
    with pytest.raises(RuntimeError):
        stream.take(3)


@pytest.fixture
def cache() -> PrefixCache:
    return PrefixCache(Pages(7, 4), 2)


def add(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """Caches every whole block of ``tokens``, one page each, held by the cache alone; returns the pages."""
    pages = cache.pages.take(len(tokens) // cache.size)
    spans = [Span(torch.zeros(1, 1), [1] * cache.size, frozenset({page})) for page in pages]
    cache.add("namespace", tokens, spans)
    cache.pages.release(pages)
    return pages


def find(cache: PrefixCache, tokens: list[int], namespace: str = "namespace") -> list[int]:
    return [page for span in cache.find(namespace, tokens) for page in span.pages]


def test_whole_blocks_are_found_as_far_as_tokens_agree(cache):
    pages = add(cache, [1, 2, 3, 4, 5])
    assert len(pages) == 2
    assert find(cache, [1, 2, 3, 4, 9]) == pages
    assert find(cache, [1, 2, 3, 9]) == pages[:1]
    assert find(cache, [1]) == find(cache, [9, 2]) == find(cache, [1, 2], "other") == []


def test_a_block_is_found_only_behind_the_blocks_before_it(cache):
    add(cache, [1, 2, 3, 4])
    add(cache, [7, 8, 3, 4])
    assert len(cache) == 4
    assert not set(find(cache, [1, 2, 3, 4])) & set(find(cache, [7, 8, 3, 4]))
    assert find(cache, [3, 4]) == []


def test_spans_that_are_found_are_held(cache):
    (page,) = add(cache, [1, 2])
    assert add(cache, [1, 2])
    assert (len(cache), cache.pages.held, cache.pages._holders[page]) == (1, 1, 1), "a known block is cached once"
    pages = find(cache, [1, 2])
    assert cache.pages._holders[page] == 2
    cache.clear()
    assert (len(cache), cache.pages._holders[page]) == (0, 1)
    cache.pages.release(pages)
    assert cache.pages.held == 0


def test_the_least_recently_used_block_is_evicted_first_but_after_its_followers(cache):
    pages = add(cache, [1, 2, 3, 4])
    pages += add(cache, [5, 6, 7, 8])
    cache.pages.release(find(cache, [1, 2, 3, 4]))  # now the most recently used
    for free, holders in ((3, [1, 1, 1, 0]), (4, [1, 1, 0, 0]), (5, [1, 0, 0, 0])):
        assert cache.make_room(free)
        assert [cache.pages._holders[page] for page in pages] == holders


def test_room_is_made_only_as_far_as_necessary_and_possible(cache):
    (page,) = add(cache, [1, 2])
    assert cache.make_room(5)
    assert len(cache) == 1
    pages = find(cache, [1, 2])
    assert not cache.make_room(6)
    assert cache.pages._holders[page] == 1
    cache.pages.release(pages)
    assert cache.make_room(6)
