"""What tinsmith.torch holds above its inputs in eager mode, by the largest resident set of a
process of its own, and that it imports no compiler there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tinsmith.torch as tt
import torch
from support import beside

MIB = 1 << 20
N, V, D = 512, 1 << 15, 512  # logits (N, V) and the weight (V, D) are 64 MiB
ROWS = 4  # hidden states of a weight that gets a gradient
COMPILER = ("torch._dynamo", "torch._inductor", "sympy")


def of_logits(call):
    """Leaves (N, V), and the loss of them."""
    ids, teacher = torch.randint(0, V, (N,)), torch.randn(N, V)
    return (torch.randn(N, V),), lambda x: call(x, teacher, ids)


def of_hidden(call):
    """Leaves (ROWS, D) and (V, D)."""
    ids = torch.randint(0, V, (ROWS,))
    return (torch.randn(ROWS, D), torch.randn(V, D)), lambda x, w: call(x, w, ids)


def of_frozen(call):
    """Leaves (V, D), hidden states of 64 ids whose weight gets no gradient."""
    ids, weight = torch.randint(0, 64, (V, 2)), torch.randn(64, D)
    return (torch.randn(V, D),), lambda x: call(x, weight, ids)


def cross_entropy(**settings):
    return lambda x, w, ids: tt.linear_cross_entropy(x, w, ids, **settings).sum()


LOGITS = {
    "jsd": lambda x, y, ids: tt.generalized_jsd(x, y),
    "jsd, scaled": lambda x, y, ids: tt.generalized_jsd(x, y, top_k=8) / 3,
    "gather": lambda x, y, ids: tt.gather_logprobs(x, ids).sum(),
    "topk": lambda x, y, ids: tt.topk_logprobs(x, 8)[1].sum(),
}
HIDDEN = {
    "jsd": lambda x, w, ids: tt.generalized_jsd((x, w), (x, w)),
    "gather": lambda x, w, ids: tt.gather_logprobs(x, ids, weight=w).sum(),
    "topk": lambda x, w, ids: tt.topk_logprobs(x, 8, weight=w)[1].sum(),
    "weighted": lambda x, w, ids: tt.weighted_cross_entropy(x, w, ids, torch.rand(ROWS)),
    "mean": cross_entropy(),
    "each": cross_entropy(reduction="none"),
    "smoothed": cross_entropy(label_smoothing=0.1),
    "class weights": cross_entropy(weight=torch.rand(V), label_smoothing=0.1),
    "probabilities": lambda x, w, ids: tt.linear_cross_entropy(x, w, torch.rand(ROWS, V)),
}
FROZEN = {
    "gather": lambda x, w, ids: tt.gather_logprobs(x, ids, weight=w).sum(),
    "mean": lambda x, w, ids: tt.linear_cross_entropy(x, w, ids[:, 0]),
    "smoothed": lambda x, w, ids: tt.linear_cross_entropy(x, w, ids[:, 0], label_smoothing=0.1),
}
CASES = {
    f"{name}, {kind}": (made, call)
    for kind, made, calls in (
        ("logits", of_logits, LOGITS),
        ("hidden", of_hidden, HIDDEN),
        ("frozen", of_frozen, FROZEN),
    )
    for name, call in calls.items()
}


def resident(field):
    """Bytes of this process: VmRSS, or VmHWM, the largest since it was set back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) << 10
    raise KeyError(field)


def measure():
    """Prints, of each case, its gradients' bytes and the growth at the peak; and what of a compiler
    has been imported."""
    torch.set_num_threads(1)
    found = {}
    for name, (made, call) in CASES.items():
        leaves, loss = made(call)
        leaves = [leaf.requires_grad_() for leaf in leaves]
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        loss(*leaves).backward()
        gradients = sum(leaf.grad.nbytes for leaf in leaves)
        found[name] = gradients, resident("VmHWM") - before
    print(json.dumps([found, [name for name in COMPILER if name in sys.modules]]))


@pytest.fixture(scope="module")
def measured():
    code = "import test_torch_memory as t; t.measure()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, **beside(__file__)
    )
    return json.loads(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the largest resident set is Linux's")
@pytest.mark.parametrize("case", CASES)
def test_a_loss_holds_its_gradient_once(case, measured):
    gradients, peak = measured[0][case]
    assert gradients >= 64 * MIB
    assert peak < gradients + 32 * MIB


def test_eager_mode_imports_no_compiler(measured):
    assert measured[1] == []
