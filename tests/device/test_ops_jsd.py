"""What the general tests of test_ops.py do not see of jsd: the reference against OPSD's own loss as
torch computes it, infinities, near and equal rows, large vocabularies."""

# ruff: noqa: C408 - settings are keyword arguments, and read as such

import numpy as np
import pytest
import torch
from support import op_reference, opsd_reference
from support.op_cases import JSD_KINDS, divergence, make_jsd
from support.op_devices import DEVICES, device

INF, NAN = np.inf, np.nan


@pytest.fixture(params=DEVICES)
def dev(request):
    return device(request.param)


def torchs_terms(student, teacher, how):
    """The terms of OPSD's own loss, of tensors (T,V)."""
    return opsd_reference.generalized_jsd_loss(
        student,
        teacher,
        beta=round(how.beta, 6),
        temperature=round(how.temperature, 6),
        reduction="none",
        logits_are_probs=bool(how.probs),
        top_k=how.top_k,
        token_clip=how.clip,
    )


@pytest.mark.parametrize("kind", JSD_KINDS, ids=str)
def test_reference_is_opsds_loss_and_torchs_gradient(kind):
    args = make_jsd(np.random.default_rng(1), T=5, V=53, kind=kind)
    how = args["how"]
    finite = {x: np.maximum(args[x], -30) for x in ("student", "teacher")}
    got = op_reference.jsd(**args | finite)
    student = torch.tensor(finite["student"], requires_grad=True)
    terms = torchs_terms(student, torch.tensor(finite["teacher"]), how)
    loss = terms if how.each else terms.sum(dim=1)
    (loss * torch.tensor(args["scale"])).sum().backward()
    np.testing.assert_allclose(got["loss"], loss.detach(), rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(got["dstudent"], student.grad, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", JSD_KINDS, ids=str)
def test_reference_gradient_is_the_slope(kind):
    args = make_jsd(np.random.default_rng(2), T=3, V=41, kind=kind)
    args["student"] = np.maximum(args["student"], 1e-3 if args["how"].probs else -30)
    d, h = np.random.default_rng(3).standard_normal((3, 41)), 1e-7
    d *= args["student"] if args["how"].probs else 1
    args["teacher"] = np.maximum(args["teacher"], -30)
    sides = [
        np.sum(
            args["scale"]
            * op_reference.jsd(**args | dict(student=args["student"] + s * h * d))["loss"]
        )
        for s in (1, -1)
    ]
    slope = np.sum(op_reference.jsd(**args)["dstudent"] * d)
    np.testing.assert_allclose(slope, (sides[0] - sides[1]) / (2 * h), rtol=1e-5, atol=1e-7)


def run(dev, student, teacher, **kind):
    """Losses and gradients of rows with weight 1."""
    student, teacher = np.atleast_2d(student), np.atleast_2d(teacher)
    T, V = student.shape
    how = divergence(**kind)
    loss = (T, how.top_k or V) if how.each else (T,)
    arrays = dict(student=student, teacher=teacher, scale=np.ones(loss), loss=loss)
    return dev.call("jsd", dstudent=(T, V), **arrays, how=how, T=T, V=V)


@pytest.mark.parametrize("kind", JSD_KINDS, ids=str)
def test_no_nan_where_torch_gives_none(dev, kind):
    special = [0.0, -0.0, 1.0, -1.0, 90.0, -200.0, 1e30, -3e38, -INF]
    rng = np.random.default_rng(0)
    student, teacher = rng.choice(special, (2, 400, 41)).astype(np.float32)
    student[:100], teacher[50:150] = rng.standard_normal((2, 100, 41))
    student[200:230] = teacher[200:230]
    student[230:240], teacher[240:250] = 2.0, 2.0
    teacher[:, 7], student[:, 8] = 0.5, 0.5
    if kind.get("probs"):
        student, teacher = rng.choice([0, 1e-30, 1e-9, 1e-8, 0.3, 1], (2, 400, 41)).astype("f4")
    got = run(dev, student, teacher, **kind)
    x = torch.tensor(student, requires_grad=True)
    terms = torchs_terms(x, torch.tensor(teacher), divergence(**kind))
    loss = terms if kind.get("each") else terms.sum(dim=1)
    loss.sum().backward()
    for name, theirs in (("loss", loss.detach()), ("dstudent", x.grad)):
        ours, theirs = np.isnan(got[name]), np.isnan(theirs.numpy())
        assert ours.mean() < 0.9
        assert not (ours & ~theirs).any(), (name, np.argwhere(ours & ~theirs)[:5])


def test_a_token_without_mass_on_either_side_changes_nothing(dev):
    rng = np.random.default_rng(4)
    student, teacher = rng.standard_normal((2, 6, 50)).astype(np.float32)
    padded = [np.insert(x, [3, 3, 50], -INF, axis=1) for x in (student, teacher)]
    for beta in (0.0, 0.3, 1.0):
        short, long = run(dev, student, teacher, beta=beta), run(dev, *padded, beta=beta)
        np.testing.assert_allclose(long["loss"], short["loss"], rtol=1e-6)
        inside = np.delete(long["dstudent"], [3, 4, 52], axis=1)
        np.testing.assert_allclose(inside, short["dstudent"], rtol=1e-2, atol=1e-6)
        np.testing.assert_array_equal(long["dstudent"][:, [3, 4, 52]], 0)


def test_mass_where_the_other_has_none_is_infinite_for_kl_and_finite_between(dev):
    student, teacher = np.zeros((2, 1, 9), np.float32)
    student[0, 4], teacher[0, 2] = -INF, -INF
    assert run(dev, student, teacher, beta=0.0)["loss"] == INF
    assert run(dev, student, teacher, beta=1.0)["loss"] == INF
    assert run(dev, student, teacher, beta=0.0, clip=0.25)["loss"] < 0.3
    np.testing.assert_allclose(run(dev, student, teacher)["loss"], np.log(2) / 8, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_equal_rows_have_no_divergence_and_no_gradient(dev, beta):
    student = (np.random.default_rng(0).standard_normal((3, 2000)) * 4).astype(np.float32)
    got = run(dev, student, student, beta=beta, temperature=0.7)
    np.testing.assert_array_equal(got["loss"], 0)
    assert np.abs(got["dstudent"]).max() < 3e-7


@pytest.mark.parametrize("near", [1e-4, 1e-2])
def test_rows_that_are_nearly_equal_keep_their_digits(dev, near):
    """A student and its own teacher: f32 through logarithms gives noise here."""
    rng = np.random.default_rng(0)
    student = (rng.standard_normal((3, 3000)) * 3 + 7).astype(np.float32)
    teacher = student + (near * rng.standard_normal((3, 3000))).astype(np.float32)
    exact = op_reference.jsd(
        student.astype(float), teacher.astype(float), scale=np.ones(3), how=divergence()
    )
    got = run(dev, student, teacher)
    np.testing.assert_allclose(got["loss"], exact["loss"], rtol=2e-5)
    scale = np.abs(exact["dstudent"]).max()
    np.testing.assert_allclose(got["dstudent"], exact["dstudent"], rtol=1e-2, atol=1e-4 * scale)


def test_a_row_with_weight_zero_gets_no_gradient_whatever_its_logits(dev):
    student, teacher = np.full((2, 3, 37), NAN)
    arrays = dict(student=student, teacher=teacher, scale=np.zeros(3), loss=(3,))
    got = dev.call("jsd", dstudent=(3, 37), **arrays, how=divergence(), T=3, V=37)
    np.testing.assert_array_equal(got["dstudent"], 0)
    assert np.isnan(got["loss"]).all()


def test_ties_of_the_teacher_go_to_the_lower_id(dev):
    student = np.arange(12, dtype=np.float32)[None]
    teacher = np.zeros((1, 12), np.float32)
    teacher[0, [3, 9]] = 1
    got = run(dev, student, teacher, top_k=4)
    assert np.flatnonzero(got["dstudent"][0]).tolist() == [0, 1, 3, 9]


@pytest.mark.parametrize(
    "kind", [dict(), dict(beta=0.0), dict(top_k=100), dict(top_k=9000)], ids=str
)
def test_a_large_vocabulary(dev, kind):
    V = 151_936 if "emulated" not in dev.name else 40_001
    rng = np.random.default_rng(0)
    student, teacher = (rng.standard_normal((2, 2, V)) * 3).astype(np.float32)
    exact = op_reference.jsd(
        student.astype(float), teacher.astype(float), np.ones(2), divergence(**kind)
    )
    got = run(dev, student, teacher, **kind)
    np.testing.assert_allclose(got["loss"], exact["loss"], rtol=1e-6)
    off = np.linalg.norm(got["dstudent"] - exact["dstudent"]) / np.linalg.norm(exact["dstudent"])
    assert off < (3e-6 if dev.c.real_bytes == 4 else 4e-3)
