"""Bounded queues: order, bounds, waking up."""

from __future__ import annotations

import threading

import pytest

from fastgen.pipeline.channel import Cancelled, Channel


def test_items_arrive_in_order_and_the_sender_waits_for_room():
    channel: Channel[int] = Channel(2)
    most = []

    def send():
        for item in range(50):
            channel.put(item)
            most.append(len(channel._items))
        channel.finish()

    thread = threading.Thread(target=send)
    thread.start()
    assert list(channel) == list(range(50))
    thread.join()
    assert max(most) <= 2
    assert channel.seconds_full > 0


def test_what_is_queued_outlives_the_sender():
    channel: Channel[int] = Channel(5)
    channel.put(1)
    channel.put(2)
    channel.finish()
    assert list(channel) == [1, 2]


@pytest.mark.parametrize("full", [False, True])
def test_cancelling_wakes_whoever_waits(full):
    channel: Channel[int] = Channel(1)
    ended = []

    def wait():
        try:
            if full:
                channel.put(1)
                channel.put(2)
            else:
                next(iter(channel))
        except Cancelled:
            ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    channel.cancel()
    thread.join(timeout=10)
    assert ended == [True]
