"""The tests that ask for the same bits (sampler and trainer, alone and together, recomputed, in
several threads and batches), of models whose base weights are kept in 8, 4 and 6 bits.

Each is the test of another file, where it is said what it asks. Here the models that it loads keep
their weights in another type: int8 and int4 are made when they are loaded; a GGUF file's Q4_K, with
Q6_K and Q8_0 beside it as llama.cpp mixes them, stays as it is.
"""

from collections.abc import Callable, Iterator

import pytest
import test_distill
import test_inflight
import test_kept_forward
import test_model
import test_prefix
import test_recompute
import test_sample
import test_snapshot
import test_train
from models import WEIGHTS, loaded

KINDS = {"int8": {"int8"}, "int4": {"int4", "int8"}, "q4_k": {"q4_k", "q6_k", "int8"}}


def shared() -> tuple[object, list]:
    """The fixtures `core` and `weights` of two files."""
    adapters = [test_train.adapter_of("qwen3", seed=seed) for seed in (1, 2)]
    return loaded("qwen3").core, [adapter.snapshot() for adapter in adapters]


CASES: dict[str, Callable[[], None]] = {
    "a sample is the trainer's": lambda: (
        test_sample.test_a_sampled_logprob_is_the_trainers_bit_for_bit("qwen3")
    ),
    "a scored prompt is the trainer's": lambda: (
        test_sample.test_prompt_logprobs_are_the_trainers_bit_for_bit("llama")
    ),
    "lists of targets are the trainer's": lambda: (
        test_sample.test_scores_of_target_lists_are_the_trainers_bit_for_bit("llama", {})
    ),
    "requests together are alone": lambda: test_sample.test_a_request_gets_what_it_gets_alone(
        "cpu", "llama"
    ),
    "requests in a small cache are alone": lambda: (
        test_sample.test_a_cache_that_is_too_small_for_all_changes_nothing("cpu", 256)
    ),
    "packed is one by one": lambda: test_model.test_packed_equals_one_by_one_bit_for_bit("qwen3"),
    "a prefix is that of a longer one": lambda: (
        test_model.test_a_prefix_has_the_same_logprobs_in_a_longer_sequence("llama")
    ),
    "forward alone is forward": test_train.test_forward_alone_gives_the_same_and_no_gradients,
    "threads": test_train.test_threads_change_nothing,
    "a split batch": lambda: test_train.test_a_split_batch_equals_a_whole_one(16),
    "adapters do not meet": test_train.test_two_adapters_of_a_model_do_not_meet,
    "every plan of a step": (
        test_recompute.test_every_plan_gives_the_same_bits_in_the_memory_that_it_said
    ),
    "two halves of a call": lambda: (
        test_kept_forward.test_forward_and_backward_equal_forward_backward(
            "qwen3", test_kept_forward.KEPT["many, some kept"]
        )
    ),
    "a page of an earlier prompt": lambda: (
        test_prefix.test_a_prompt_that_begins_like_an_earlier_one_begins_with_its_pages(shared()[0])
    ),
    "weights that change": lambda: test_prefix.test_weights_that_change_are_other_weights(
        shared()[0]
    ),
    "weights that are followed": lambda: (
        test_inflight.test_weights_that_come_before_the_first_step_are_the_requests_alone(*shared())
    ),
    "a snapshot": lambda: test_snapshot.test_what_changes_the_adapter_leaves_its_snapshots(
        test_snapshot.train, 1
    ),
    "a teacher that is the student": (
        test_distill.test_the_teacher_may_be_the_student_itself_and_gets_no_gradient
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(test_sample, "JOINS", {"llama": test_sample.JOINS["qwen2"]})  # one order
    before = WEIGHTS.set(request.param)
    yield request.param
    WEIGHTS.reset(before)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_in_every_type_of_weights(kind: str, case: str) -> None:
    assert set(loaded("qwen3").packed.values()) == KINDS[kind]  # it is not the wide model
    CASES[case]()


def test_each_exactness_test_of_samples_runs_here() -> None:
    """Whoever adds one to the file on sampling is asked for a case."""
    names = {name for name in vars(test_sample) if name.endswith("_bit_for_bit")}
    said = {name for case in CASES.values() for name in case.__code__.co_names}
    assert names and names <= said
