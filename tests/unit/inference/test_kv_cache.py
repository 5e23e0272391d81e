"""Tests page allocation, streams of rows, and the prefix cache."""

import pytest
import torch

from adaponder.inference.kv_cache import Pages, PrefixCache, RowStream, Span


def test_pages_are_handed_out_once_and_page_0_never():
    pages = Pages(5, 4)
    taken = pages.take(4)
    assert sorted(taken) == [1, 2, 3, 4]
    assert (pages.free, pages.held) == (0, 4)
    assert pages.take(1) is None
    assert pages.take(0) == []
    pages.release(taken[:2])
    assert pages.take(3) is None
    assert pages.free == 2


def test_a_page_is_free_when_its_last_holder_lets_go():
    pages = Pages(3, 4)
    (page,) = pages.take(1)
    pages.hold([page])
    assert pages._holders[page] == 2
    pages.release([page])
    assert (pages._holders[page], pages.free) == (1, 1)
    pages.release([page])
    assert (pages._holders[page], pages.free) == (0, 2)


def test_a_page_cannot_be_released_or_shared_when_it_is_free():
    pages = Pages(3, 4)
    (page,) = pages.take(1)
    pages.release([page])
    with pytest.raises(RuntimeError, match=f"page {page}"):
        pages.release([page])
    with pytest.raises(RuntimeError, match=f"page {page}"):
        pages.hold([page])
    assert pages.free == 2


def test_all_can_be_freed_at_once():
    pages = Pages(4, 4)
    pages.hold(pages.take(2))
    pages.free_all()
    assert (pages.free, pages.held, sorted(pages.take(3))) == (3, 0, [1, 2, 3])


def test_a_stream_gives_the_rows_of_its_pages_in_order():
    stream = RowStream(4)
    assert stream.pages_for(0) == 0
    assert stream.pages_for(9) == 3
    stream.pages += [5, 2]
    assert stream.take(3) == [20, 21, 22]
    assert (stream.room, stream.pages_for(5), stream.pages_for(6)) == (5, 0, 1)
    assert stream.take(3) == [23, 8, 9]
    with pytest.raises(RuntimeError):
        stream.take(3)


def entered(prefixes, root, tokens):
    """Caches every whole block of ``tokens``, one page each, held by the cache alone."""
    count = len(tokens) // prefixes.size
    taken = prefixes.pages.take(count)
    spans = [Span(torch.zeros(1, 1), [1] * prefixes.size, frozenset({page})) for page in taken]
    prefixes.add(root, tokens, spans)
    prefixes.pages.release(taken)
    return taken


def pages_of(spans):
    return [page for span in spans for page in span.pages]


def opened(count=8):
    return PrefixCache(Pages(count, 4), 2)


def test_whole_blocks_are_found_as_far_as_tokens_agree():
    prefixes = opened()
    taken = entered(prefixes, "root", [1, 2, 3, 4, 5])
    assert len(taken) == 2
    assert pages_of(prefixes.find("root", [1, 2, 3, 4, 9])) == taken
    assert pages_of(prefixes.find("root", [1, 2, 3, 9])) == taken[:1]
    assert prefixes.find("root", [1]) == prefixes.find("root", [9, 2]) == prefixes.find("other", [1, 2]) == []


def test_a_block_is_found_only_behind_the_blocks_before_it():
    prefixes = opened()
    entered(prefixes, "root", [1, 2, 3, 4])
    entered(prefixes, "root", [7, 8, 3, 4])
    assert len(prefixes) == 4
    first, second = prefixes.find("root", [1, 2, 3, 4]), prefixes.find("root", [7, 8, 3, 4])
    assert not set(pages_of(first)) & set(pages_of(second))
    assert prefixes.find("root", [3, 4]) == []


def test_what_is_found_is_held():
    prefixes = opened()
    (page,) = entered(prefixes, "root", [1, 2])
    assert prefixes.pages._holders[page] == 1
    spans = prefixes.find("root", [1, 2])
    assert prefixes.pages._holders[page] == 2
    prefixes.clear()
    assert (len(prefixes), prefixes.pages._holders[page]) == (0, 1)
    prefixes.pages.release(pages_of(spans))
    assert prefixes.pages.held == 0


def test_a_block_that_is_known_is_entered_once():
    prefixes = opened()
    first, second = entered(prefixes, "root", [1, 2]), entered(prefixes, "root", [1, 2])
    assert len(prefixes) == 1
    assert prefixes.pages._holders[first[0]] == 1
    assert prefixes.pages._holders[second[0]] == 0 or first == second


def test_the_block_unused_for_longest_goes_first_and_a_blocks_followers_before_it():
    prefixes = opened(7)  # six pages
    old = entered(prefixes, "root", [1, 2, 3, 4])
    young = entered(prefixes, "root", [5, 6, 7, 8])
    prefixes.pages.release(pages_of(prefixes.find("root", [1, 2, 3, 4])))  # used, so that it is younger
    assert prefixes.make_room(3)
    assert [prefixes.pages._holders[page] for page in [*old, *young]] == [1, 1, 1, 0]
    assert prefixes.make_room(4)
    assert [prefixes.pages._holders[page] for page in [*old, *young]] == [1, 1, 0, 0]
    assert prefixes.make_room(5)
    assert [prefixes.pages._holders[page] for page in [*old, *young]] == [1, 0, 0, 0]


def test_room_is_made_only_as_far_as_it_is_wanted_and_can_be():
    prefixes = opened(4)
    (page,) = entered(prefixes, "root", [1, 2])
    assert prefixes.make_room(2)
    assert len(prefixes) == 1
    spans = prefixes.find("root", [1, 2])
    assert not prefixes.make_room(3)
    assert prefixes.pages._holders[page] == 1
    prefixes.pages.release(pages_of(spans))
    assert prefixes.make_room(3)
