from __future__ import annotations

import threading

import pytest

from cbgen.job.channel import Channel, Slots


def in_thread(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_a_taker_gets_all_that_is_there_in_order():
    channel = Channel()
    channel.put([1, 2])
    channel.put([3])
    assert channel.take() == [1, 2, 3]


def test_a_taker_gets_no_more_than_it_asks_for():
    channel = Channel()
    channel.put([1, 2, 3])
    assert channel.take(2) == [1, 2]
    assert channel.take(2) == [3]


def test_a_taker_waits_for_the_first_item_only():
    channel = Channel()
    taken = []
    thread = in_thread(lambda: taken.extend(channel.take()))
    channel.put([1])
    thread.join(5)
    assert taken == [1]


def test_a_full_channel_blocks_until_something_is_taken():
    channel = Channel(capacity=1)
    channel.put([1])
    was_put = threading.Event()

    def put():
        channel.put([2])
        was_put.set()

    in_thread(put)
    assert not was_put.wait(0.05)
    assert channel.take() == [1]
    assert was_put.wait(5)


def test_a_closed_channel_gives_what_is_there_and_then_nothing():
    channel = Channel()
    channel.put([1])
    channel.close()
    assert channel.take() == [1]
    channel.put([2])
    assert channel.take() == []


def test_closing_wakes_whoever_waits_to_put():
    channel = Channel(capacity=1)
    channel.put([1])
    thread = in_thread(lambda: channel.put([2]))
    channel.close()
    thread.join(5)
    assert not thread.is_alive()


def test_a_failure_reaches_the_taker_after_the_items_before_it():
    channel = Channel()
    channel.put([1])
    channel.close(KeyError("cause"))
    channel.close(ValueError("later"))
    assert channel.take() == [1]
    with pytest.raises(KeyError, match="cause"):
        channel.take()


def test_taking_ends_after_the_timeout():
    assert Channel().take(timeout=0.01) == []


def test_slots_give_what_is_free_and_wait_for_the_first():
    slots = Slots(3)
    assert slots.acquire(2) == 2
    assert slots.acquire(2) == 1
    acquired = []
    thread = in_thread(lambda: acquired.append(slots.acquire(5)))
    slots.release()
    thread.join(5)
    assert acquired == [1]


def test_closed_slots_give_nothing():
    slots = Slots(0)
    acquired = []
    thread = in_thread(lambda: acquired.append(slots.acquire(1)))
    slots.close()
    thread.join(5)
    assert acquired == [0]


def test_put_says_whether_items_were_taken():
    channel = Channel()
    assert channel.put([1])
    channel.close()
    assert not channel.put([2])
    assert channel.take() == [1]
