"""The tests that ask for the same bits (sampler and trainer, alone and together, recomputed, in
several threads and batches), in every type of base weights and on every device that has it.

Each is the test of another file, where it is said what it asks; there it runs in f32 on the CPU.
KINDS is the table of the others: a new type, or device, is a row, and gets them all. int8 and int4
are made when a model is loaded; the blocks of a GGUF file, some with Q6_K or Q8_0 beside them as
llama.cpp mixes them, and those of FP8 and NF4 folders, stay as they are. That products are the
same for few rows and many is asked of each type by test_packed.py, test_packed_cuda.py and
test_few_rows.py.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import pytest
import test_distill
import test_forward_then_backward
import test_inflight
import test_model
import test_prefix
import test_recompute
import test_sample
import test_snapshot
import test_train
from support.op_devices import device
from support.tiny_models import DEVICE, WEIGHTS, loaded
from tinsmith import _core

pytestmark = pytest.mark.pairs


@dataclass(frozen=True)
class Kind:
    """What weights are kept in: the test models' setting (tiny_models.py), the device, and the
    types of the matrices that then have blocks. `cases` that it gets; on an emulated GPU not those
    that take it seconds."""

    weights: str
    device: str = "cpu"
    blocks: frozenset[str] = frozenset()

    @property
    def cases(self) -> Iterable[str]:
        return BRIEF if self.device == "cuda-emulated" else CASES


def kinds(device: str, *names: str) -> dict[str, Kind]:
    """Rows of a device; those of the CPU go by the type alone."""
    found = {}
    for name in names:
        title = name if device == "cpu" else f"{name} on {device}"
        found[title] = Kind(name, device, frozenset(BLOCKS.get(name, {name, "int8"})))
    return found


BLOCKS = {
    "bf16": (),
    "int8": {"int8"},
    "fp8": {"fp8"},
    "nf4": {"nf4"},
    "q4_k": {"q4_k", "q6_k", "int8"},
}
BLOCKS |= {"q5_k": {"q5_k", "q6_k", "int8"}}
FILES = ("q4_0", "q4_1", "mxfp4")
KINDS = {
    **kinds("cpu", "bf16", "int8", "int4", *FILES, "fp8", "nf4", "q4_k", "q5_k"),
    **kinds("cpu-bf16", "bf16", "int8", "int4", *FILES, "fp8", "nf4", "q4_k"),
    **kinds("cpu-int16", "int8", "int4", *FILES, "q4_k", "q5_k"),
    **kinds("cuda-emulated", "int8", "int4", *FILES),
}
BRIEF = (
    "a scored prompt is the trainer's", "packed is one by one", "a prefix is that of a longer one",
    "forward alone is forward", "a split batch", "weights that are followed", "a snapshot",
)  # fmt: skip


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
        DEVICE.get(), "llama"
    ),
    "requests in a small cache are alone": lambda: (
        test_sample.test_a_cache_that_is_too_small_for_all_changes_nothing(DEVICE.get(), 256)
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
        test_forward_then_backward.test_forward_and_backward_equal_forward_backward(
            "qwen3", test_forward_then_backward.KEPT["many, some kept"]
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


@pytest.fixture
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kind]:
    row = KINDS[request.param]
    if row.device == "cuda-emulated":
        device(row.device)  # which is built first, if it can be
    elif reason := _core.devices()[row.device]:
        pytest.skip(reason)
    monkeypatch.setattr(test_sample, "JOINS", {"llama": test_sample.JOINS["qwen2"]})  # one order
    before = WEIGHTS.set(row.weights), DEVICE.set(row.device)
    yield row
    WEIGHTS.reset(before[0])
    DEVICE.reset(before[1])


@pytest.mark.parametrize(
    ("kind", "case"),
    [(name, case) for name, kind in KINDS.items() for case in kind.cases],
    indirect=["kind"],
)
def test_the_same_bits_in_every_type_of_weights(kind: Kind, case: str) -> None:
    assert set(loaded("qwen3").packed.values()) == kind.blocks  # it is not the wide model
    CASES[case]()


def test_each_exactness_test_of_samples_runs_here() -> None:
    """Whoever adds one to the file on sampling is asked for a case."""
    names = {name for name in vars(test_sample) if name.endswith("_bit_for_bit")}
    said = {name for case in CASES.values() for name in case.__code__.co_names}
    assert names and names <= said
