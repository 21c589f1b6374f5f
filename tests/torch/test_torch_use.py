"""tinsmith.torch as torch is used: torch's cross-entropy with its options and dtypes, compiled,
checkpointed, under autocast and torch.func, in two processes; against torch in float64."""

import os
import subprocess
import sys

import pytest
import tinsmith.ops
import tinsmith.torch as tt
import torch
import torch.nn.functional as F
from support import beside
from torch.utils.checkpoint import checkpoint

N, V, D = 6, 53, 9
TOLERANCE = {torch.float64: 2e-5, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def near(ours, exact, dtype=torch.float32):
    assert ours.dtype == dtype
    error = (ours.detach().double() - exact).norm() / exact.norm()
    assert error < TOLERANCE[dtype], error


def inputs(dtype=torch.float32, lead=(2, N)):
    torch.manual_seed(1)
    made = [torch.randn(s).to(dtype).requires_grad_() for s in ((*lead, D), (V, D), (V,))]
    return made, [x.detach().double().requires_grad_() for x in made]


def exact_loss(x, w, b, target, weight=None, reduction="mean", **settings):
    """torch's own, of rows in any number of dimensions."""
    logits = F.linear(x, w, b)
    flat = target.reshape(-1, V) if target.is_floating_point() else target.reshape(-1)
    loss = F.cross_entropy(logits.reshape(-1, V), flat, weight, reduction=reduction, **settings)
    return loss.reshape(x.shape[:-1]) if reduction == "none" else loss


def targets(soft=False):
    torch.manual_seed(2)
    if soft:
        return torch.randn(2, N, V).double().softmax(-1)
    ids = torch.randint(0, V, (2, N))
    ids[0, 1], ids[1, 3] = -100, 7
    return ids


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_linear_cross_entropy_is_torchs(reduction, soft, smoothing, weighted, frozen):
    (x, w, b), exact = inputs()
    trained = [0] if frozen else [0, 1, 2]
    w.requires_grad_(not frozen), b.requires_grad_(not frozen)
    target, weight = targets(soft), torch.rand(V).double() if weighted else None
    how = {"reduction": reduction, "label_smoothing": smoothing}
    ignore = {} if soft else {"ignore_index": 7}
    ours = tt.linear_cross_entropy(
        x,
        w,
        target if soft else target.where(target >= 0, 3),
        linear_bias=b,
        weight=None if weight is None else weight.float(),
        **how,
        **ignore,
    )
    given = target if soft else target.where(target >= 0, 3)
    truth = exact_loss(*exact, given, weight, **how, **ignore)
    near(ours, truth)
    by = torch.rand(truth.shape) + 1
    (ours * by).sum().backward()
    (truth * by).sum().backward()
    for i in trained:
        near((x, w, b)[i].grad, exact[i].grad)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_results_and_gradients_are_of_the_inputs_dtype(dtype, reduction, soft, smoothing):
    (x, w, _), (x64, w64, _) = inputs(dtype)
    how = {"reduction": reduction, "label_smoothing": smoothing}
    loss = tt.linear_cross_entropy(x, w, targets(soft), **how)
    truth = exact_loss(x64, w64, None, targets(soft), **how)
    near(loss, truth, dtype)
    loss.sum().backward()
    truth.sum().backward()
    near(x.grad, x64.grad, dtype)
    near(w.grad, w64.grad, dtype)


def test_any_strides():
    (x, w, _), _ = inputs()
    weight = torch.cat([w, w], 1).detach()[:, ::2].requires_grad_()  # no two are neighbours
    tokens = torch.randint(0, V, (2, N))
    exact = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    ours = tt.linear_cross_entropy(x[:, :-1], weight, tokens[:, 1:])
    truth = exact_loss(exact[0][:, :-1], exact[1], None, tokens[:, 1:])
    near(ours, truth)
    ours.backward()
    truth.backward()
    near(x.grad, exact[0].grad)
    near(weight.grad, exact[1].grad)


def cases():
    """What has a gradient, of (hidden, weight): by name."""
    ids, some = targets().clamp_min(0), torch.arange(N * 6).reshape(2, N, 3)
    teacher, probabilities = torch.randn(2, N, V), targets(soft=True)
    return {
        "mean": lambda x, w: tt.linear_cross_entropy(x, w, ids),
        "none": lambda x, w: tt.linear_cross_entropy(x, w, ids, reduction="none"),
        "smoothed": lambda x, w: tt.linear_cross_entropy(x, w, ids, label_smoothing=0.1),
        "probabilities": lambda x, w: tt.linear_cross_entropy(x, w, probabilities),
        "gather": lambda x, w: tt.gather_logprobs(x, some, weight=w),
        "topk": lambda x, w: tt.topk_logprobs(x, 4, weight=w)[1],
        "jsd": lambda x, w: tt.generalized_jsd((x, w), teacher, top_k=5),
        "jsd terms": lambda x, w: tt.generalized_jsd((x, w), teacher, reduction="none"),
    }


def gradients(call, frozen=False, seed=5):
    (x, w, _), _ = inputs()
    w.requires_grad_(not frozen)
    out = call(x, w)
    torch.manual_seed(seed)
    (out * torch.rand(out.shape)).sum().backward()
    return [out.detach(), x.grad] + ([] if frozen else [w.grad])


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", cases())
def test_compiled_without_a_graph_break(name, frozen):
    call = cases()[name]
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(compiled, frozen), gradients(call, frozen), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_by_inductor():
    torch.compiler.reset()
    call = cases()["smoothed"]
    # Torch would compile a program for each vector instruction set, and import itself in it.
    plain = {"cpp.vec_isa_ok": False, "compile_threads": 1}
    compiled = torch.compile(call, fullgraph=True, options=plain)
    for a, b in zip(gradients(compiled), gradients(call), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", cases())
def test_checkpointed(name):
    call = cases()[name]
    again = gradients(lambda x, w: checkpoint(call, x, w, use_reentrant=False))
    for a, b in zip(again, gradients(call), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", cases())
def test_a_graph_goes_backward_twice_but_has_no_second_derivative(name):
    (x, w, _), _ = inputs()
    out = cases()[name](x, w).sum()
    first = torch.autograd.grad(out, (x, w), retain_graph=True)
    second = torch.autograd.grad(out, (x, w), create_graph=True)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        second[0].square().sum().backward()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("name", cases())
def test_gradients_add_up_over_several_passes(name, frozen):
    """What forward kept is scaled in its place only by the last pass."""
    (x, w, _), _ = inputs()
    w.requires_grad_(not frozen)
    leaves = (x,) if frozen else (x, w)
    once = torch.autograd.grad(cases()[name](x, w).sum(), leaves)
    out = cases()[name](x, w).sum()
    for factor, again in ((3, True), (1, True), (2, False)):
        (factor * out).backward(retain_graph=again)
    for leaf, gradient in zip(leaves, once, strict=True):
        torch.testing.assert_close(leaf.grad, 6 * gradient)


def test_probabilities_have_a_gradient():
    (x, w, _), (x64, w64, _) = inputs()
    target, weight = targets(True).float().requires_grad_(), torch.rand(V)
    exact = target.detach().double().requires_grad_()
    how = {"label_smoothing": 0.2, "reduction": "none"}
    tt.linear_cross_entropy(x, w, target, weight=weight, **how).square().sum().backward()
    exact_loss(x64, w64, None, exact, weight.double(), **how).square().sum().backward()
    near(target.grad, exact.grad)


@pytest.mark.parametrize("name", ["none", "smoothed", "gather", "jsd"])
def test_finite_differences(name):
    """The engine computes in float32: steps of 1e-2, and two digits."""
    (x, w, _), _ = inputs(torch.float64)
    assert torch.autograd.gradcheck(
        cases()[name], (x, w), eps=1e-2, atol=5e-3, rtol=1e-2, nondet_tol=0.0, fast_mode=True
    )


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_torch_func_is_refused_with_a_sentence(transform):
    (x, w, _), _ = inputs()
    for call in cases().values():
        with pytest.raises(RuntimeError, match=r"torch.func .* use torch.autograd.grad"):
            transform(lambda x, call=call: call(x, w).sum())(x.detach())


def test_autocast_gives_float32():
    (x, w, _), (_, w64, _) = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        for smoothing in (0.0, 0.1):
            loss = tt.linear_cross_entropy(x.bfloat16(), w, targets(), label_smoothing=smoothing)
            exact = exact_loss(
                x.detach().bfloat16().double(), w64, None, targets(), label_smoothing=smoothing
            )
            near(loss, exact)


def test_opcheck():
    (x, w, _), _ = inputs()
    ids, y = targets().clamp_min(0), torch.randn(2, N, V)
    by, labels = torch.rand(2, N), targets()
    how = (0.5, 1.0, "sum", False, 0, float("inf"))
    op = torch.ops.tinsmith
    for call, arguments in (
        (op.gather.default, (x, w, ids, None, False)),
        (op.gather.default, (x, w, ids, targets(True), False)),
        (op.topk.default, (x.detach(), w.detach(), 3)),
        (op.cross_entropy.default, (x, w, ids, by, True, True)),
        (op.jsd.default, (x, w, y, None, labels, *how, True, True)),
        (op.jsd_terms.default, (x, w, y, None, None, 0.5, 1.0, False, 0, float("inf"))),
    ):
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(call, arguments, test_utils=tests)


def test_module_has_torchs_signature():
    torch.manual_seed(0)
    ours = tt.LinearCrossEntropyLoss(D, V, bias=True, label_smoothing=0.1, ignore_index=7)
    torchs = torch.nn.LinearCrossEntropyLoss(
        D, V, bias=True, label_smoothing=0.1, ignore_index=7
    ).double()
    torchs.load_state_dict(ours.state_dict())
    x, target = torch.randn(N, D), torch.randint(0, V, (N,))
    near(ours(x, target), torchs(x.double(), target))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"reduction": "all"}, "reduction must be one of none, mean, sum"),
        ({"label_smoothing": 2.0}, "label_smoothing must be in"),
        ({"weight": torch.rand(3)}, r"weight must be \(53,\)"),
        ({"linear_bias": torch.rand(3)}, r"linear_bias must be \(53,\)"),
        ({"linear_weight": torch.rand(V, 2)}, r"linear_weight must be \(V, 9\)"),
        ({"target": torch.zeros(4, dtype=torch.long)}, r"target of ids must be \(2, 6\)"),
        ({"target": targets(True), "ignore_index": 1}, "these are probabilities"),
    ],
    ids=str,
)
def test_a_mistake_gets_a_sentence(change, sentence):
    (x, w, _), _ = inputs()
    arguments = {"input": x, "linear_weight": w, "target": targets()} | change
    with pytest.raises(ValueError, match=sentence):
        tt.linear_cross_entropy(**arguments)


def of_one_rank(rank, meeting):
    """What each of two processes does: a backward of its half of the rows; asserts that the
    gradient is that of all rows. It leaves by _exit: the end of gloo's group waits for a thread
    that may never end, and what is left of it may end a usual exit by SIGABRT."""
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    torch.manual_seed(0)
    module = tt.LinearCrossEntropyLoss(D, V)
    x, target = torch.randn(8, D), torch.randint(0, V, (8,))
    alone = torch.autograd.grad(module(x, target), module.linear.weight)[0]
    both = torch.nn.parallel.DistributedDataParallel(module)
    both(x[rank::2], target[rank::2]).backward()
    torch.testing.assert_close(module.linear.weight.grad, alone)
    os._exit(0)


def test_two_processes_have_the_gradient_of_one(tmp_path):
    meeting = f"file://{tmp_path / 'meet'}"
    code = f"import test_torch_use as t; t.of_one_rank(%d, {meeting!r})"
    commands = ([sys.executable, "-c", code % rank] for rank in range(2))
    both = [subprocess.Popen(command, **beside(__file__)) for command in commands]
    try:
        assert [one.wait(60) for one in both] == [0, 0]
    finally:
        for one in both:
            one.kill()
            one.wait()


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.1}], ids=str)
def test_a_mean_of_nothing_leaves_weights_as_they_are(settings):
    """NaN, as torch's, but its gradients are zeros."""
    (x, w, b), _ = inputs()
    nothing = torch.full((2, N), -100)
    loss = tt.linear_cross_entropy(x, w, nothing, linear_bias=b, **settings)
    assert loss.isnan()
    for gradient in torch.autograd.grad(loss, (x, w, b)):
        assert not gradient.any() and not gradient.isnan().any()


@pytest.mark.parametrize(("dtype", "ignored"), [(torch.uint8, -100), (torch.int8, 156)], ids=str)
def test_no_id_of_8_bits_is_ignored_by_a_number_it_has_not(dtype, ignored):
    x, w = torch.randn(2, D), torch.randn(200, D)
    target = torch.tensor([156, 3] if dtype is torch.uint8 else [100, 3], dtype=dtype)
    found = tt.linear_cross_entropy(x, w, target, reduction="none", ignore_index=ignored)
    wanted = F.cross_entropy(x @ w.T, target.long(), reduction="none")
    torch.testing.assert_close(found, wanted)


X, W, IDS = torch.randn(2, D), torch.randn(V, D), torch.tensor([1, 2])


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: tt.gather_logprobs(X, [1, 2]), "ids must be a tensor, not list"),
        (
            lambda: tt.gather_logprobs(X, IDS, weight=W.long()),
            "weight must be a tensor of floating-point",
        ),
        (lambda: tt.topk_logprobs(X, 2.0), "k must be a whole number, not float"),
        (
            lambda: tt.weighted_cross_entropy(X, W, IDS, [1, 2]),
            "weights must be a tensor, not list",
        ),
        (
            lambda: tt.generalized_jsd((X, W, W), (X, W)),
            "student must be logits or a pair .* 3 arr",
        ),
        (lambda: tinsmith.ops.gather_logprobs(X.numpy(), None), "must be a NumPy array or have __"),
    ],
)
def test_what_is_no_argument_gets_a_sentence(call, sentence):
    with pytest.raises(TypeError, match=sentence):
        call()


def test_a_top_k_that_no_integer_holds_gets_a_sentence():
    with pytest.raises(ValueError, match=f"top_k must be at most 2147483647, not {10**30}"):
        tt.generalized_jsd((X, W), (X, W), top_k=10**30)
