"""Which process gets a sampling request, and what a request tells that is repeated."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.images import Held
from tinsmith.engine import groups
from tinsmith.engine.decoding import SampleDelta, SampleRequest, SampleResult
from tinsmith.engine.image_cache import HeldImage
from tinsmith.engine.replica import PAGE, Crew, Weights, untold

BASE = Weights("tiny", None)


class Named(SimpleNamespace):
    """A replica that computes nothing."""

    __hash__ = object.__hash__


def crew(count: int) -> Crew:
    found = Crew()
    found.replicas = [Named(name=f"replica {n}", bases={"tiny"}) for n in range(count)]
    return found


def ask(prompt: Sequence[int], samples: int = 1) -> SampleRequest:
    return SampleRequest(np.asarray(prompt, np.int32), num_samples=samples)


def place(found: Crew, request: SampleRequest, weights: Weights = BASE) -> tuple[Any, Future]:
    """Where a request goes, and its future there."""
    chosen, future = found.choose(weights, request), Future[Any]()
    found.count(chosen, future, request.num_samples)
    return chosen, future


def test_requests_that_begin_alike_go_to_one_place_and_others_are_spread() -> None:
    found, used = crew(3), Counter[Any]()
    for number in range(200):
        first = found.choose(BASE, ask([number] * PAGE + [1]))
        assert first is found.choose(BASE, ask([number] * PAGE + [2, 3])), "their first page is one"
        used[first] += 1
    assert len(used) == 4 and min(used.values()) > 20
    adapters = [Weights("tiny", SimpleNamespace(stamp=n)) for n in range(50)]
    assert len({found.choose(weights, ask([5])) for weights in adapters}) == 4


def test_when_a_replica_goes_only_its_requests_move() -> None:
    found = crew(3)
    before = {n: found.choose(BASE, ask([n])) for n in range(100)}
    lost = found.replicas.pop()
    after = {n: found.choose(BASE, ask([n])) for n in range(100)}
    assert all((before[n] is after[n]) == (before[n] is not lost) for n in before)


def test_no_place_has_much_more_than_its_share() -> None:
    """Though all requests begin alike; and an ended one counts no more."""
    found = crew(3)
    placed = [place(found, ask([7], samples)) for samples in (1, 4, 2, 1) * 25]
    loads = [found.load(one) for one in (None, *found.replicas)]
    assert sum(loads) == 200 and max(loads) <= 1.25 * 50 + 4
    for _, future in placed:
        future.set_result(None)
    assert not any(found.load(one) for one in (None, *found.replicas))


def test_a_replica_without_the_model_gets_nothing() -> None:
    found = crew(2)
    found.replicas[0].bases, found.replicas[1].bases = set(), set()
    assert found.choose(BASE, ask([5])) is None and found.places("tiny") == 1


def test_calls_of_one_part_go_to_whoever_has_the_fewest_requests() -> None:
    """Each call has a list of its own of those that help, and gives its first part to the first."""
    found = crew(3)
    for replica in found.replicas:
        replica.waiting = 0
    for number in range(9):
        alive = found.helpers(f"run {number}", BASE, None)
        assert alive is not None
        first = next(iter(alive()))
        first.replica.waiting += 1
    assert [one.waiting for one in found.replicas] == [3, 3, 3]


def delta(number: int, tokens: Sequence[int], stop: str | None = None) -> SampleDelta:
    ids = np.asarray(tokens, np.int32)
    return SampleDelta(number, ids, ids.astype(np.float32), stop, ids[:, None], None)


def test_a_repeated_request_tells_what_was_not_told() -> None:
    heard: list[SampleDelta] = []
    told: dict[int, int] = {}
    hear = untold(heard.extend, told)
    hear([delta(0, [1, 2]), delta(1, [9])])
    hear([delta(0, [3])])
    again = untold(heard.extend, told)
    again([delta(0, [1])])
    assert len(heard) == 3, "nothing of it is new"
    again([delta(0, [2, 3, 4]), delta(1, [9, 8], "stop")])
    again([delta(0, [], "length")])
    zero = [part for part in heard if part.number == 0]
    assert np.concatenate([part.tokens for part in zero]).tolist() == [1, 2, 3, 4]
    assert np.concatenate([part.topk_ids for part in zero]).ravel().tolist() == [1, 2, 3, 4]
    assert [part.stop_reason for part in zero] == [None, None, None, "length"]
    assert [part.tokens.tolist() for part in heard if part.number == 1] == [[9], [8]]


@pytest.mark.parametrize(("samples", "places", "sizes"), [
    (15, 4, [15]), (16, 4, [8, 8]), (100, 3, [33, 33, 34]), (40, 8, [8] * 5), (7, 1, [7]),
])  # fmt: skip
def test_parts_of_a_request_are_numbered_on(samples: int, places: int, sizes: list[int]) -> None:
    whole = SampleRequest(np.asarray([5], np.int32), samples, prompt_logprobs=True, topk_prompt=2)
    parts = groups.split(whole, places)
    assert [part.num_samples for part in parts] == sizes
    assert [part.first_sample for part in parts] == [sum(sizes[:n]) for n in range(len(sizes))]
    scored = [part.prompt_logprobs and part.topk_prompt == 2 for part in parts]
    assert scored == [True] + [False] * (len(parts) - 1)
    results = [SampleResult(tuple(f"{n}" for _ in range(size))) for n, size in enumerate(sizes)]
    assert len(groups.merge(results).samples) == samples


def test_a_request_with_images_stays_with_the_owner_who_has_their_pixels() -> None:
    image = HeldImage(Held(-1, 1, 1, 3072))
    asked = SampleRequest(np.asarray([-1, 5], np.int32), 100, max_tokens=3, images=(image,))
    assert groups.split(asked, 4) == [asked]
    assert groups.bounded(asked, 99, lambda: 99) is None
    assert groups.bounded(replace(asked, images=()), 99, lambda: 99) is not None
