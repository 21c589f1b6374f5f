"""Dimuon's step against its formula in float64, on every device: LoRA-Muon's, by singular values
and eigenvectors, where the engine has Cholesky's factors and Newton's iteration."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tiny_models import call, error, loaded_anew, randomize
from support.training_cases import ADAM, adapter_of, batch
from tinsmith import _core
from tinsmith.checkpoints.lora import factors

pytestmark = [pytest.mark.usefixtures("on"), pytest.mark.pairs]

DIMUON = {
    "learning_rate": 0.02, "beta1": 0.9, "damping": 1e-4, "rank_lr_correction_exponent": 0.175,
    "grad_clip_norm": 0.0,
}  # fmt: skip
Matrix = NDArray[np.float64]


def dimuon(name: str = "qwen3", **options: Any) -> _core.Adapter:
    return adapter_of(name, optimizer="dimuon", **options)


def pairs(adapter: _core.Adapter) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Where the matrices of each product lie in the flat vectors: (D,R) and (R,N). The experts of a
    layer that have one of them in common are one product, of all their own ones side by side."""
    places = np.arange(adapter.size)
    found = iter(factors(adapter))
    for a, b in zip(found, found, strict=True):
        assert (a.letter, b.letter, a.slot) == ("A", "B", b.slot)
        first, second = a.view(places), b.view(places)
        if a.count:
            first = first.swapaxes(0, 1).reshape(adapter.rank, -1)  # (count,R,D): D side by side
            second = second.reshape(-1, adapter.rank)  # (count,N,R)
        yield first.T, second.T


def root(matrix: Matrix) -> Matrix:
    """The inverse root of a positive matrix."""
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * values**-0.5) @ vectors.T


def damped(gram: Matrix, damping: float) -> Matrix:
    unit, mean = np.eye(len(gram)), np.trace(gram) / len(gram)
    return gram / mean + damping * unit if mean else unit


def direction(moment: Matrix, other: Matrix, damping: float) -> Matrix:
    """Where A (D,R) goes, of its moment and of Bᵀ (N,R). B is the other way round."""
    side = root(damped(other.T @ other, damping))
    whole = side @ damped(moment.T @ moment, damping) @ side
    found = moment @ side @ root(whole) @ side
    norm = np.linalg.norm(found)
    return found * np.sqrt(moment.shape[1]) / norm if norm else found


class Reference:
    """Weights and moments in float64."""

    def __init__(self, adapter: _core.Adapter):
        self.weights = adapter.read("weights").astype(float)
        self.m = np.zeros(adapter.size)
        self.pairs = list(pairs(adapter))
        self.rank = adapter.rank

    def step(self, gradient: NDArray[np.float32], **o: float) -> float:
        """One step; the norm of the gradient before it is clipped."""
        gradient = gradient.astype(float)
        norm = float(np.linalg.norm(gradient))
        if 0 < o["grad_clip_norm"] < norm:
            gradient = gradient * o["grad_clip_norm"] / norm
        self.m = o["beta1"] * self.m + (1 - o["beta1"]) * gradient
        rate = o["learning_rate"] * (self.rank / 32) ** o["rank_lr_correction_exponent"]
        before = self.weights.copy()
        for a, b in self.pairs:
            self.weights[a] -= rate * direction(self.m[a], before[b].T, o["damping"])
            self.weights[b] -= rate * direction(self.m[b].T, before[a], o["damping"]).T
        return norm


def gradients(adapter: _core.Adapter, seed: int, fade: float = 0.0) -> NDArray[np.float32]:
    """Random ones, whose singular values fade in a matrix by this factor from one to the next; of
    one pair they are zero."""
    rng = np.random.default_rng(seed)
    flat = rng.standard_normal(adapter.size) * 1e-3
    for number, (a, b) in enumerate(pairs(adapter)):
        for place, turned in ((a, 0), (b, 1)):
            u, s, v = np.linalg.svd(flat[place].T if turned else flat[place], full_matrices=False)
            matrix = (u * s * np.exp(-fade * np.arange(len(s)))) @ v
            flat[place] = (matrix.T if turned else matrix) * (number != 1)
    return flat.astype(np.float32)


CHANGES = (
    {},
    {"learning_rate": 0.05, "beta1": 0.5},
    {"rank_lr_correction_exponent": 0.0, "grad_clip_norm": 0.3},
    {"rank_lr_correction_exponent": -0.5, "damping": 0.01, "grad_clip_norm": -1.0},
    {"damping": 1e-5, "beta1": 0.0, "grad_clip_norm": 1e9},
)


@pytest.mark.parametrize(("name", "rank"), [("qwen3", 5), ("qwen3", 32), ("qwen3_moe", 4)])
@pytest.mark.parametrize("fade", [0.0, 0.7])
def test_steps_follow_the_formula(name: str, rank: int, fade: float) -> None:
    adapter = dimuon(name, rank=rank)
    exact = Reference(adapter)
    start = exact.weights.copy()
    for step, change in enumerate(CHANGES):
        gradient, settings = gradients(adapter, step, fade), DIMUON | change
        adapter.write("gradients", gradient)
        report = adapter.optim_step(**settings)
        norm = exact.step(gradient, **settings)
        clip = settings["grad_clip_norm"]
        clipped = clip if 0 < clip < norm else norm
        assert report["grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert report["grad_norm_clipped"] == pytest.approx(clipped, rel=1e-4)
        assert error(adapter.read("weights") - start, exact.weights - start) < 1e-4
        assert error(adapter.read("m"), exact.m) < 1e-5
        weights = adapter.read("weights").astype(float)
        assert report["weight_norm"] == pytest.approx(np.linalg.norm(weights), rel=1e-9)
        assert adapter.step == step + 1 and not adapter.read("gradients").any()


def test_without_damping_it_is_lora_muons_step() -> None:
    """msign by singular values, of moments that have all of them."""
    adapter = dimuon(rank=4, unembed=False)
    before, gradient = adapter.read("weights").astype(float), gradients(adapter, 3)
    adapter.write("gradients", gradient)
    adapter.optim_step(**DIMUON | {"damping": 1e-12, "rank_lr_correction_exponent": 0.0})
    moved = adapter.read("weights") - before
    for number, (a, b) in enumerate(pairs(adapter)):
        if number == 1:  # it has no gradient
            assert not moved[a].any() and not moved[b].any()
            continue
        for place, side in ((a, before[b] @ before[b].T), (b.T, before[a].T @ before[a])):
            whitened = gradient[place].astype(float) @ root(side)
            u, _, v = np.linalg.svd(whitened, full_matrices=False)
            wanted = -(u @ v) @ root(side)
            wanted *= DIMUON["learning_rate"] * 2.0 / np.linalg.norm(wanted)  # √R is 2
            assert error(moved[place], wanted) < 1e-4


def test_a_new_adapters_first_step_moves_b_alone() -> None:
    adapter = dimuon(rank=4)
    weights = adapter.read("weights")
    exact = Reference(adapter)
    for _, b in exact.pairs:
        weights[b] = 0.0
    adapter.write("weights", weights)
    exact.weights = weights.astype(float)
    call(adapter, batch("qwen3"))
    gradient = adapter.read("gradients")
    assert all(not gradient[a].any() and gradient[b].any() for a, b in exact.pairs)
    adapter.optim_step(**DIMUON)
    exact.step(gradient, **DIMUON)
    moved = adapter.read("weights") - weights
    assert error(moved, exact.weights - weights) < 1e-3
    rate = DIMUON["learning_rate"] * (4 / 32) ** 0.175
    for a, b in exact.pairs:
        assert not moved[a].any()
        assert np.linalg.norm(moved[b]) == pytest.approx(2 * rate, rel=1e-5)  # √R is 2


def test_a_steps_scratch_is_not_in_the_next_calls_gradients() -> None:
    adapter, plain = dimuon(), adapter_of("qwen3")
    for learning_rate in (0.02, 1e38):  # a step that is taken, and one that is refused
        adapter.write("gradients", gradients(adapter, 0) * 1e6)
        try:
            adapter.optim_step(**DIMUON | {"learning_rate": learning_rate})
        except FloatingPointError:
            adapter.clear_gradients()
        plain.write("weights", adapter.read("weights"))
        plain.clear_gradients()
        for one in (adapter, plain):
            call(one, batch("qwen3"))
        np.testing.assert_array_equal(adapter.read("gradients"), plain.read("gradients"))


def test_no_result_depends_on_the_number_of_threads() -> None:
    found = []
    for threads in (1, 3):
        core = loaded_anew("qwen3", threads).core
        adapter = randomize(_core.Adapter(core, rank=20, optimizer="dimuon"))
        for step in range(2):
            adapter.write("gradients", gradients(adapter, step))
            adapter.optim_step(**DIMUON)
        found.append(adapter.read("weights").tobytes() + adapter.read("m").tobytes())
    assert found[0] == found[1]


def test_it_learns() -> None:
    adapter, data = dimuon(rank=4), batch("qwen3")
    data = [one for one in data if len(one.tokens) > 1]
    for one in data:
        one.inputs.clear()
    losses = []
    for _ in range(10):
        losses.append(call(adapter, data)[1])
        adapter.optim_step(**DIMUON)
    assert losses[9] < 0.8 * losses[0] and all(np.isfinite(losses))


def state_of(adapter: _core.Adapter) -> list[Any]:
    """All that a step may change."""
    vectors = ("weights", "gradients", "m")
    return [adapter.read(what).tobytes() for what in vectors] + [adapter.step, adapter.pending]


@pytest.mark.parametrize(
    ("options", "vectors"),
    [
        ({"learning_rate": 1e38}, {}),
        ({"learning_rate": 1e300}, {}),
        ({"rank_lr_correction_exponent": -1e6}, {}),
        ({"beta1": 0.5}, {"m": 3e38, "gradients": -3e38}),
        ({"damping": 1e-200}, {"gradients": "one row"}),
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_leaves_all_as_it_was(
    options: dict[str, float], vectors: dict[str, Any]
) -> None:
    adapter, other = dimuon(), dimuon()
    for one in (adapter, other):
        call(one, batch("qwen3"))
        one.optim_step(**DIMUON)
        call(one, batch("qwen3"))
    kept = {what: adapter.read(what) for what in vectors}
    for what, value in vectors.items():
        flat = kept[what].copy()
        for a, b in pairs(adapter):
            if value == "one row":
                flat[a] = flat[a[:1]]
                flat[b] = flat[b[:, :1]]
            else:
                flat[a.flat[0]] = value
        adapter.write(what, flat)
    if "one row" in vectors.values():
        adapter.write("m", np.zeros(adapter.size, np.float32))
    before, copy = state_of(adapter), adapter.snapshot()
    with pytest.raises(FloatingPointError, match=r"learning_rate .* was not taken"):
        adapter.optim_step(**DIMUON | options)
    assert state_of(adapter) == before
    assert copy.read("weights").tobytes() == before[0]
    if not vectors:  # and it goes on as if it had not been asked
        assert adapter.optim_step(**DIMUON) == other.optim_step(**DIMUON)
        assert state_of(adapter) == state_of(other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("learning_rate", -1.0), ("learning_rate", float("nan")), ("beta1", 1.0), ("damping", 0.0),
        ("damping", float("inf")), ("rank_lr_correction_exponent", float("-inf")),
        ("grad_clip_norm", float("nan")),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named(key: str, value: float) -> None:
    adapter = dimuon()
    call(adapter, batch("qwen3"))
    before = state_of(adapter)
    with pytest.raises(ValueError, match=f"{key} must be"):
        adapter.optim_step(**DIMUON | {key: value})
    assert state_of(adapter) == before


def test_an_adapter_has_one_optimizer() -> None:
    ours, theirs = dimuon(), adapter_of("qwen3")
    assert (ours.optimizer, theirs.optimizer, ours.snapshot().optimizer) == (
        "dimuon",
        "adamw",
        "dimuon",
    )
    with pytest.raises(ValueError, match="dimuon has no beta2"):
        ours.optim_step(**ADAM)
    with pytest.raises(ValueError, match="adamw has no damping"):
        theirs.optim_step(**DIMUON)
    with pytest.raises(ValueError, match="with dimuon has weights, gradients, m, but no 'v'"):
        ours.read("v")
    with pytest.raises(ValueError, match="rank 257 is more than 256, which dimuon takes"):
        dimuon(rank=257)
    with pytest.raises(ValueError, match="'sgd' is not built; tinsmith has adamw and dimuon"):
        adapter_of("qwen3", optimizer="sgd")


def test_a_snapshot_keeps_its_weights() -> None:
    adapter = dimuon()
    copy, before = adapter.snapshot(), adapter.read("weights")
    call(adapter, batch("qwen3"))
    adapter.optim_step(**DIMUON)
    np.testing.assert_array_equal(copy.read("weights"), before)
    assert (adapter.read("weights") != before).any()
