"""Tests the prefix cache: lookup, holding of pages, and eviction."""

import torch

from adaponder.inference.pages import Pages
from adaponder.inference.prefixes import Prefixes, Span


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
    return Prefixes(Pages(count, 4), 2)


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
