"""Tests page allocation: reference counts, and streams of rows."""

import pytest

from adaponder.inference.pages import Pages, RowStream


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
