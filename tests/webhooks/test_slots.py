"""Slots: first come first served, and none is lost."""

from __future__ import annotations

import asyncio

import pytest

from app.webhooks.slots import Slots

pytestmark = pytest.mark.anyio


async def _hold(slots: Slots, order: list[int], number: int, let_go: asyncio.Event, limit: int = 1) -> None:
    async with slots.slot("key", limit):
        order.append(number)
        await let_go.wait()


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_waits_is_served_in_order() -> None:
    slots, order, let_go = Slots(), [], asyncio.Event()
    tasks = [asyncio.create_task(_hold(slots, order, number, let_go)) for number in range(5)]
    await _settle()
    assert order == [0]
    let_go.set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2, 3, 4]
    assert slots.busy("key") == 0


async def test_keys_do_not_wait_for_each_other() -> None:
    slots = Slots()
    async with slots.slot("a", 1), slots.slot("b", 1):
        assert (slots.busy("a"), slots.busy("b")) == (1, 1)


async def test_a_raised_limit_lets_more_in_and_a_lowered_one_waits() -> None:
    slots, order, let_go = Slots(), [], asyncio.Event()
    first = asyncio.create_task(_hold(slots, order, 0, let_go))
    await _settle()
    second = asyncio.create_task(_hold(slots, order, 1, let_go, limit=2))
    await _settle()
    third = asyncio.create_task(_hold(slots, order, 2, let_go, limit=1))
    await _settle()
    assert order == [0, 1]
    let_go.set()
    await asyncio.gather(first, second, third)
    assert order == [0, 1, 2]


@pytest.mark.parametrize("is_given", [False, True])
async def test_a_waiter_that_gives_up_takes_no_slot_along(is_given: bool) -> None:
    slots, order, let_go = Slots(), [], asyncio.Event()
    first, second, third = (asyncio.create_task(_hold(slots, order, number, let_go)) for number in range(3))
    await _settle()
    if is_given:
        first.cancel()
        await asyncio.wait([first])
    second.cancel()
    await asyncio.wait([second])
    let_go.set()
    await asyncio.wait([first, third], timeout=1)
    assert third.done()
    assert order[-1] == 2
    assert slots.busy("key") == 0


async def test_a_slot_given_to_a_waiter_that_is_cancelled_in_that_moment_is_not_lost() -> None:
    slots, order, let_go = Slots(), [], asyncio.Event()
    let_go.set()
    async with slots.slot("key", 1):
        waiter = asyncio.create_task(_hold(slots, order, 1, let_go))
        await _settle()
    waiter.cancel()
    await asyncio.wait([waiter])
    assert (order, slots.busy("key")) == ([], 0)
