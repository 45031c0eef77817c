"""The order in which a server carries out requests."""

import random

from isoloss.tools.serve.front.order import Order


def taken(order: Order, most: int = 8) -> list:
    found = []
    while (each := order.take(most)) is not None:
        found.append(each)
    return found


def test_requests_of_a_training_client_go_by_their_numbers_whatever_comes_first():
    expected = [("a", [k]) for k in range(20)]
    for seed in range(20):
        order: Order[int] = Order()
        order.start("a", 0)
        numbers = list(range(20))
        random.Random(seed).shuffle(numbers)
        found = []
        for k in numbers:
            order.add("a", k, k)
            found += taken(order)
        assert found == expected


def test_a_gap_holds_what_comes_after_it_and_not_another_client():
    order: Order[str] = Order()
    order.start("a", 0)
    order.start("b", 5)
    order.add("a", 1, "a1")
    order.add("b", 5, "b5")
    assert taken(order) == [("b", ["b5"])]
    order.add("a", 0, "a0")
    assert taken(order) == [("a", ["a0"]), ("a", ["a1"])]
    assert len(order) == 0


def test_clients_take_turns_and_completions_come_between():
    order: Order[str] = Order()
    for lane in "ab":
        order.start(lane, 0)
        for k in range(2):
            order.add(lane, k, f"{lane}{k}")
    for k in range(3):
        order.add_sample("v", f"v{k}")
    order.add_sample("w", "w0")
    found = taken(order, 2)
    assert [items for lane, items in found if lane in "ab"] == [["a0"], ["b0"], ["a1"], ["b1"]]
    assert [items for lane, items in found if lane in "vw"] == [["v0", "v1"], ["w0"], ["v2"]]
    kinds = [lane in "vw" for lane, _ in found]
    assert kinds[:6] == [False, True, False, True, False, True]


def test_what_nobody_waits_for_leaves():
    order: Order[str] = Order()
    order.start("a", 0)
    order.add("a", 0, "a0")
    order.add_sample("v", "v0")
    order.add_sample("v", "v1")
    order.add_sample("w", "w0")
    assert order.withdraw(lambda item: item != "v1") == ["v0", "w0"]
    assert order.forget("a") == ["a0"]
    assert taken(order) == [("v", ["v1"])]


def test_without_room_for_completions_training_goes_on():
    order: Order[str] = Order()
    order.start("a", 0)
    order.add_sample("v", "v0")
    order.add("a", 0, "a0")
    assert taken(order, 0) == [("a", ["a0"])]
    assert taken(order) == [("v", ["v0"])]
