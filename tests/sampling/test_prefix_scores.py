"""What a page's rows told is remembered with it, and who begins like another one does not compute
the same beside it. Every case compares with the same request on a sampler of its own, bit for bit.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.op_devices import device
from support.sampler_loop import step_until_interrupted
from support.tiny_models import PADDING, Spec, assert_same, make, randomize
from tinsmith import _core
from tinsmith.models.registry import load_model

PAGE = 64
VOCAB = 107  # of the model
Request = dict[str, Any]  # the arguments of Sampler.add after the request's number
SCORED: Request = {"prompt_logprobs": True, "topk_prompt": 8, "max_tokens": 1}
BF16 = "cpu-bf16"
NO_BF16 = pytest.mark.skipif(bool(_core.devices()[BF16]), reason=_core.devices()[BF16])


SPEC = Spec(
    "qwen3",
    {"vocab_size": VOCAB, "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 6,
     "num_key_value_heads": 2, "head_dim": 10, "max_position_embeddings": 300},
    torch.bfloat16,
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bf16 model with room for four pages and more."""
    return make(SPEC, tmp_path_factory.mktemp("model"))


@pytest.fixture(
    params=("cpu", pytest.param(BF16, marks=NO_BF16), "cuda", "cuda-emulated"), scope="module"
)
def core(request: pytest.FixtureRequest, checkpoint: Path) -> _core.Model:
    """It on every device; on the CPU with both types of products."""
    if request.param == BF16:
        return load_model(checkpoint, dtype="bfloat16", threads=1).core
    device(request.param)
    return load_model(checkpoint, device=request.param, threads=1).core


class Room:
    """A sampler with its requests; counts steps."""

    def __init__(self, core: _core.Model, tokens: int = 8192):
        self.core, self.sampler = core, _core.Sampler(core, tokens=tokens)
        self.asked: dict[int, Request] = {}
        self.results: dict[int, dict[str, Any]] = {}
        self.steps = 0

    def add(self, asked: Request) -> int:
        number = len(self.asked)
        self.asked[number] = asked
        self.sampler.add(number, **asked)
        return number

    def step(self) -> list[tuple[int, int, int]]:
        self.steps += 1
        drawn, done = self.sampler.step()
        self.results |= {number: self.sampler.take(number) for number in done}
        return drawn

    def finish(self) -> None:
        """Runs to the end and compares each result with the same request's alone."""
        most = self.steps + 5_000
        while self.sampler.active:
            self.step()
            assert self.steps < most, "the sampler does not get on"
        for number in list(self.results):
            assert_same(self.results.pop(number), alone(self.core, self.asked[number]))

    def reused(self, *asked: Request) -> int:
        """Runs these requests together; the tokens that were found."""
        before = self.sampler.reused
        for one in asked:
            self.add(one)
        self.finish()
        return self.sampler.reused - before


def alone(core: _core.Model, asked: Request) -> dict[str, Any]:
    """A request's result where nothing is known."""
    sampler = _core.Sampler(core, tokens=1024)
    sampler.add(0, **asked)
    while not sampler.step()[1]:
        pass
    assert sampler.reused == 0
    return sampler.take(0)


def emulated(core: _core.Model) -> bool:
    return core.device == "cuda-emulated"


def ask(prompt: np.ndarray, **options: Any) -> Request:
    return {"prompt": prompt, "max_tokens": 4, "seed": 3, **options}


def scored(prompt: np.ndarray, **options: Any) -> Request:
    return ask(prompt, **(SCORED | options))


def text(length: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, length])
    return rng.integers(0, VOCAB - PADDING, length).astype(np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def lists(length: int, first: int = 0) -> Request:
    """Two ids to score at every position after `first`."""
    counts = np.where(np.arange(length - 1) < first, 0, 2)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return {"targets": text(int(starts[-1]), seed=9), "target_starts": starts}


# ---- what a page told ----


def test_scores_are_found_with_the_pages(core: _core.Model) -> None:
    room, prompt = Room(core), text(150)
    assert room.reused(scored(prompt)) == 0
    for options in ({}, {"topk_prompt": 3}, {"topk_prompt": 0}, {"prompt_logprobs": False}):
        assert room.reused(scored(prompt, **options)) == 2 * PAGE, options
    longer = joined(prompt, text(70, seed=1))
    assert room.reused(scored(longer)) == 2 * PAGE
    assert room.reused(scored(longer)) == 3 * PAGE
    assert room.reused(ask(prompt, topk_sample=2, num_samples=3)) == 2 * PAGE


def test_who_asks_for_more_than_was_told_runs_the_rows_and_tells_it(core: _core.Model) -> None:
    room, prompt = Room(core), text(150)
    assert room.reused(ask(prompt)) == 0
    for options in ({"topk_prompt": 0}, {"topk_prompt": 1}, {"topk_prompt": 9}):
        assert room.reused(scored(prompt, **options)) == 0, options
        assert room.reused(scored(prompt, **options)) == 2 * PAGE, options
    assert room.reused(scored(prompt, topk_prompt=30)) == 0
    assert room.reused(scored(prompt, topk_prompt=9)) == 2 * PAGE


def test_positions_that_are_not_scored_need_no_scores(core: _core.Model) -> None:
    room, prompt = Room(core), text(200)
    room.reused(ask(prompt))
    assert room.reused(scored(prompt, prompt_from=70)) == PAGE  # page 1 was not scored yet
    for start, found in ((70, 3), (71, 3), (129, 3), (69, 1), (69, 3), (66, 1), (1, 0), (0, 3)):
        assert room.reused(scored(prompt, prompt_from=start)) == found * PAGE, start


def test_the_last_rows_token_lies_behind_the_page(core: _core.Model) -> None:
    room, page = Room(core), text(PAGE)
    one, other = np.full(3, 5, np.int32), np.full(3, 6, np.int32)
    assert room.reused(scored(page)) == 0  # its last row told nothing of what comes
    assert room.reused(scored(joined(page, one))) == 0
    assert room.reused(scored(joined(page, one))) == PAGE
    assert room.reused(scored(joined(page, other))) == 0
    assert room.reused(scored(joined(page, other))) == PAGE
    assert room.reused(ask(joined(page, one))) == PAGE


def test_ids_of_ones_own_and_draws_are_run(core: _core.Model) -> None:
    room, prompt = Room(core), text(150)
    room.reused(scored(prompt))
    for options in (lists(150), {"prompt_draws": 2}, {"prompt_draws": 2, **lists(150, 140)}):
        assert room.reused(scored(prompt, **options)) == 0
    # Nothing is asked of the rows before the first that has a list, but what a page told.
    for first, found in ((64, 1), (63, 0), (128, 2), (127, 1)):
        assert room.reused(ask(prompt, **lists(150, first))) == found * PAGE, first
        assert room.reused(scored(prompt, **lists(150, first))) == found * PAGE, first
    # They tell of a prompt's own tokens what others do.
    other = text(150, seed=1)
    room.reused(scored(other, prompt_draws=1, **lists(150)))
    assert room.reused(scored(other)) == 2 * PAGE
    # A request that has lists alone tells nothing.
    for seed, first in ((2, 140), (3, 0)):
        third = text(150, seed)
        room.reused(ask(third, **lists(150, first)))
        assert room.reused(scored(third, topk_prompt=0)) == 0


def test_scores_are_of_these_weights(core: _core.Model) -> None:
    room, prompt = Room(core), text(150)
    adapter = randomize(_core.Adapter(core, rank=2), 1)
    room.reused(scored(prompt))
    assert room.reused(scored(prompt, adapter=adapter)) == 0
    snapshot = adapter.snapshot()
    assert room.reused(scored(prompt, adapter=snapshot)) == 2 * PAGE
    randomize(adapter, 2)
    assert room.reused(scored(prompt, adapter=adapter)) == 0
    assert room.reused(scored(prompt, adapter=snapshot)) == 2 * PAGE
    assert room.reused(scored(prompt)) == 2 * PAGE


def test_scores_do_not_depend_on_how_is_sampled(core: _core.Model) -> None:
    room, prompt = Room(core), text(100)
    hot = {"temperature": 0.3, "top_k": 2, "top_p": 0.5, "seed": 8, "max_tokens": 5}
    room.reused(scored(prompt, **hot))
    assert room.reused(scored(prompt), scored(prompt, **hot)) == 2 * PAGE


def test_scores_go_with_their_page(core: _core.Model) -> None:
    room, prompt = Room(core, tokens=4 * PAGE), text(150)
    room.reused(scored(prompt, topk_prompt=0))
    assert room.reused(scored(prompt, topk_prompt=0)) == 2 * PAGE
    for seed in range(1, 3):  # they take all pages
        room.reused(ask(text(150, seed)))
    assert room.reused(ask(prompt)) == 0
    assert room.reused(scored(prompt, topk_prompt=0)) == 0
    assert room.reused(scored(prompt, topk_prompt=0)) == 2 * PAGE


def test_scores_of_a_page_are_not_those_of_the_one_in_its_place(core: _core.Model) -> None:
    room = Room(core, tokens=4 * PAGE)
    for seed in range(6):
        prompt = text(150, seed)
        prompt[[PAGE, 2 * PAGE]] = 7  # the token behind a page is compared
        assert room.reused(ask(prompt)) == 0
        assert room.reused(scored(prompt, topk_prompt=0)) == 0
        assert room.reused(scored(prompt, topk_prompt=0)) == 2 * PAGE


def test_what_is_remembered_of_scores_is_bounded(core: _core.Model) -> None:
    """A page's scores, 256 bytes and 512 for each of the best, against 1/16 of the cache."""
    if emulated(core):
        pytest.skip("it is the host's alone, and long")
    pages = 64
    most = pages * PAGE * core.plan(1, 1)["kv_token"] // 16
    room, prompts = Room(core, tokens=pages * PAGE), [text(150, seed) for seed in range(pages // 3)]
    for top in (0, 4, 32):
        fit = most // (256 + 512 * top) // 2  # prompts of two full pages
        for prompt in prompts:
            room.reused(scored(prompt, topk_prompt=top))
        found = [room.reused(scored(one, topk_prompt=top)) for one in prompts[-fit:]]
        assert sum(found) == 2 * PAGE * len(found), top
    assert 0 < fit < len(prompts)
    beyond = prompts[-fit - 1]
    assert room.reused(scored(beyond, topk_prompt=32)) == 0
    assert room.reused(ask(beyond)) == 2 * PAGE  # the page is still there
    few = Room(core, tokens=3 * PAGE)  # not a page's scores fit
    for _ in range(2):
        assert few.reused(scored(prompts[0], topk_prompt=VOCAB)) == 0


def test_a_failed_step_forgets_scores_too(core: _core.Model) -> None:
    room, prompt = Room(core), text(150)
    room.reused(scored(prompt))
    assert room.reused(scored(prompt)) == 2 * PAGE
    step_until_interrupted(
        room.sampler, lambda: room.add(ask(text(150, seed=5), max_tokens=9)), room.step
    )
    room.finish()
    assert room.reused(scored(prompt)) == 0
    assert room.reused(scored(prompt)) == 2 * PAGE


# ---- together ----


def group(length: int, count: int, **options: Any) -> list[Request]:
    """A prompt with several answers, scored."""
    stem = text(length)
    return [scored(joined(stem, text(20, seed)), **options) for seed in range(1, count + 1)]


def test_a_group_that_comes_together_computes_its_prompt_once(core: _core.Model) -> None:
    room = Room(core)
    assert room.reused(*group(137, 6)) == 5 * 2 * PAGE
    assert room.steps == 2
    room = Room(core)
    asked = [ask(joined(text(130), text(9, seed)), seed=seed) for seed in range(1, 7)]
    assert room.reused(*asked) == 5 * 2 * PAGE
    room = Room(core)
    adapters = [None, randomize(_core.Adapter(core, rank=2), 1)]
    every = [one | {"adapter": adapter} for one in group(70, 3) for adapter in adapters]
    assert room.reused(*every) == 2 * 2 * PAGE
    room = Room(core)  # of several clients; in turns, each gets what it would have alone
    assert (
        room.reused(*[one | {"client": seed} for seed, one in enumerate(group(137, 4))]) == 6 * PAGE
    )


def test_who_asks_for_more_does_not_wait_for_less(core: _core.Model) -> None:
    for first, second, found in (
        (scored(text(150), topk_prompt=3), scored(text(150), topk_prompt=4), 0),
        (scored(text(150), topk_prompt=4), scored(text(150), topk_prompt=3), 2),
        (scored(text(150), prompt_from=2), scored(text(150)), 0),
        (scored(text(150)), scored(text(150), prompt_from=2), 2),
        (ask(text(150)), scored(text(150)), 0),
        (scored(text(150)), ask(text(150)), 2),
        (scored(text(150)), scored(text(150), **lists(150)), 0),
        (scored(text(150), **lists(150)), scored(text(150)), 2),
        (scored(text(150), prompt_draws=1), scored(text(150)), 2),
        (scored(text(150)), scored(text(150), prompt_draws=1), 0),
        (scored(joined(text(PAGE), text(9))), scored(joined(text(PAGE), text(8, seed=1))), 0),
    ):
        room = Room(core)
        room.add(first)
        room.add(second)
        room.step()
        assert room.reused() == found * PAGE, (first, second)
        waited = found > 0
        assert room.steps == max(first["max_tokens"], second["max_tokens"] + waited)


def test_pieces_of_a_long_prompt_are_shared_as_they_come(core: _core.Model) -> None:
    """Three prompts of which two begin alike, of two clients: 512 rows a step do not hold them."""
    room, filler = Room(core), [ask(text(150, seed=20 + n), max_tokens=1) for n in range(8)]
    for one in filler:
        room.add(one | {"client": 1})
    same = [ask(joined(text(140), text(9, seed)), client=seed % 2) for seed in range(4)]
    assert room.reused(*same) == 3 * 2 * PAGE


def test_clients_with_small_parts_of_a_step_share_and_are_not_later(core: _core.Model) -> None:
    asked = [one | {"client": seed} for seed, one in enumerate(group(137, 16))]
    room = Room(core)  # 32 rows each
    assert room.reused(*asked) == 15 * 2 * PAGE
    assert room.steps <= -(-157 // 32)


def test_nobody_waits_for_a_slower_one(core: _core.Model) -> None:
    """In line: a prompt that leaves 6 of its client's 256 rows, a short one of another client, both
    clients' seconds, which are alike, and who wants the rest."""
    room = Room(core)
    firsts = [ask(text(250), client=1), ask(text(5), client=2)]
    for one in (*firsts, ask(text(150), client=1), ask(text(150), client=2)):
        room.add(one)
    room.add(ask(text(200), client=2))
    assert {number for number, _, _ in room.step()} == {0, 1, 3}
    room.finish()


def test_nobody_waits_in_the_middle_of_a_page(core: _core.Model) -> None:
    room = Room(core)
    for one in (text(250), text(242), text(100)):  # of the third 20 rows are run
        room.add(ask(one))
    room.step()
    room.add(ask(text(100), client=1))  # and it goes first
    assert {number for number, _, _ in room.step()} == {0, 1, 2, 3}
    room.finish()


def test_the_next_in_line_goes_on_where_a_cancelled_one_was(core: _core.Model) -> None:
    for taken_away in ("cancel", "stop"):
        room, asked = Room(core), group(130, 4)
        for one in asked:
            room.add(one | {"max_tokens": 4})
        # The first runs beside 400 rows of others, so that it is in the middle of its prompt.
        blocked = Room(core)
        numbers = [blocked.add(ask(text(150, seed=40 + n), max_tokens=1)) for n in range(3)]
        numbers += [blocked.add(one | {"max_tokens": 4}) for one in asked]
        for one in (room, blocked):
            one.step()
            first = 0 if one is room else numbers[3]
            if taken_away == "cancel":
                one.sampler.cancel(first)
            else:
                if one is blocked:  # it is in its prompt
                    with pytest.raises(ValueError, match="no token to end with"):
                        one.sampler.stop(first, 0)
                    one.sampler.cancel(first)
                else:
                    one.sampler.stop(first, 0)
                one.step()
                one.results.pop(first, None)
            one.finish()
        assert room.sampler.reused == 3 * 2 * PAGE


def test_a_leader_that_is_put_off_is_not_waited_for(core: _core.Model) -> None:
    """A cache for one of them at a time, and clients whose first sequences go before."""
    for pages in (4,) if emulated(core) else (3, 4, 5, 8):
        room = Room(core, tokens=pages * PAGE)
        for one in group(110, 5, max_tokens=30):
            room.add(one | {"client": 1})
        for turn in range(12):
            room.step()
            room.add(ask(text(40 + turn, seed=turn), client=2 + turn, max_tokens=20))
        room.finish()


def test_ones_that_end_at_once_do_not_go_one_after_the_other(core: _core.Model) -> None:
    room = Room(core)  # 512 rows a step: in the second there are 32 of the 13th to be copied
    assert room.reused(*[ask(text(40), seed=n, max_tokens=1) for n in range(20)]) == 7 * 32
    assert room.steps == 2
    (first,) = alone(core, ask(text(40)))["samples"]
    stop = {"stop_ids": first["tokens"][:1], "seed": 3}
    room = Room(core)  # the first has ended when the others could have copied its prompt's rows
    assert room.reused(*[ask(text(40), max_tokens=9, **stop) for _ in range(10)]) == 0
    assert room.steps == 2


def test_the_part_of_a_page_is_copied_from_who_goes_on_in_it(core: _core.Model) -> None:
    room = Room(core)
    assert room.reused(*[ask(text(50), seed=n, max_tokens=20) for n in range(8)]) == 7 * 49
    assert room.steps == 21
    room = Room(core)
    prompts = [joined(text(30), text(9, seed)) for seed in range(1, 5)]
    assert room.reused(*[ask(one, max_tokens=90) for one in prompts]) == 3 * 30
    room = Room(core)  # a full page is found, the rest of the prompt copied
    assert room.reused(*[ask(text(100), seed=n, num_samples=2) for n in range(3)]) == 2 * 99
    room = Room(core)  # too few to wait for
    assert room.reused(*[ask(text(15), seed=n, max_tokens=20) for n in range(4)]) == 0
    room = Room(core)  # rows that are scored are run
    assert room.reused(*[scored(text(50), max_tokens=9) for _ in range(4)]) == 0
    assert room.reused(*[scored(text(50), max_tokens=9, prompt_from=31) for _ in range(4)]) == 90
    room = Room(core)
    adapter = randomize(_core.Adapter(core, rank=2), 1)
    assert room.reused(ask(text(50)), ask(text(50), adapter=adapter), ask(text(50))) == 49


def test_who_comes_later_copies_what_is_there(core: _core.Model) -> None:
    room = Room(core)
    room.add(ask(text(40), max_tokens=20))
    for _ in range(5):
        room.step()
    assert room.reused(ask(text(40), seed=5), ask(joined(text(40)[:25], text(9)))) == 39 + 25


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_together_gets_what_it_gets_alone(core: _core.Model, seed: int) -> None:
    """Prompts that begin alike, of all kinds, at any time, some cancelled, in a small cache."""
    if emulated(core) and seed:
        pytest.skip("it is long, emulated")
    rng = np.random.default_rng(seed)
    adapters = [None, randomize(_core.Adapter(core, rank=2), 1)]
    room = Room(core, tokens=int(rng.choice([3, 5, 9, 60])) * PAGE)
    stems = [text(140, seed=n) for n in range(2)]
    for number in range(12 if emulated(core) else 30):
        stem = stems[rng.integers(2)][: rng.integers(1, 141)]
        prompt = joined(stem, text(int(rng.integers(1, 9)), seed=int(rng.integers(2))))
        options: Request = {"adapter": adapters[rng.integers(2)], "seed": number}
        options |= {"client": int(rng.integers(3)), "max_tokens": int(rng.integers(1, 10))}
        options |= {"num_samples": int(rng.choice([1, 1, 3]))}
        kind = rng.integers(6)
        if kind < 3:
            options |= {"prompt_logprobs": True, "topk_prompt": int(rng.integers(0, 5))}
        if kind == 1:
            options |= {"prompt_from": int(rng.integers(len(prompt)))}
        if kind == 2:
            options |= lists(len(prompt), int(rng.integers(len(prompt))))
        if kind == 3:
            options |= {"prompt_draws": 1}
        room.add(ask(prompt, **options))
        for _ in range(rng.integers(4)):
            room.step()
        if rng.integers(6) == 0 and number not in room.results:
            room.sampler.cancel(number)
    room.finish()
    assert room.sampler.reused > 0
