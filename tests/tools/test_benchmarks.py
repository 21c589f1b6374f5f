"""The programs of benchmarks/ run: each at a tiny shape, with every row and side of its tables, and
a plot that is valid SVG and names both sides. What they measure is not tested; how a table makes
its ratio and its share of the roofline of it is."""

import argparse
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from support import ROOT
from support.op_devices import cpu_has
from tinsmith import _core

pytestmark = pytest.mark.slow

FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))
llama, machine, reports = map(importlib.import_module, ("llama", "machine", "report"))

CORES = machine.cores()  # with all of them a program need not begin anew
measured = functools.cache(machine.measure)  # once for all programs
REASON = _core.devices()["cpu-bf16"]
NEEDS_BF16 = pytest.mark.skipif(bool(REASON), reason=REASON)
HAS_LLAMA = importlib.util.find_spec("llama_cpp") is not None
PROGRAMS = {
    "ops": "--head 4 512 3 --product 5 16 24 --product 1 16 24 --experts 4 16 8 24 --flops 1e4",
    "train": "--shape tiny --datums 2 --length 9",
    "train --custom": "--shape tiny --datums 2 --length 9 --dtype bf16",
    "sample": "--shape tiny --batches 1 3 --prompt 5 --new 4 --prefill 11 --adapter",
    "dtypes": "--shape tiny --length 9 --new 3 --batches 2",
    "chunks": "--tokens 70",
    "head": "jsd topk gather loss first --vocab 400 --rows 9 --width 16 --positions 5",
    "distill": "--shape tiny --datums 2 --prompt 3 --hint 3 --completion 4",
    "memory tokens keep start": "--shape tiny --tokens 256 --peer-tokens 0",
    "recipe": "--groups 2 --max-tokens 3",
    "scaling threads tokens length rank adapters": (
        "--shape tiny --batches 1 3 --datums 2 --length 9 --new 2 --clock wall"
    ),
    "start": "",
    "load": "--model SmolLM2-135M --layers 1 --vocab 64",
    "off_policy": "--steps 3 --groups 1 --group-size 2 --stale 1",
    "latency": "--request 1 --adapter 1 --model 1",
    "page": "--steps 1 --datums 1 --runs 2",
    "front": "--users 2 --calls 1 --runs 2 --datums 2 --length 300",
}
ROWS = {  # case -> sides, "" for any further case of the table
    "ops": {
        "logprob": ["tinsmith", "torch"],
        "topk_logprob, K = 3": ["tinsmith", "torch"],
        "sample": ["tinsmith", "torch"],
        "5 × 16 × 24": ["tinsmith", "torch"],
        "1 × 16 × 24": ["tinsmith", "torch"],
        "x·wᵀ, f32": ["tinsmith", "dense"],
        "dy·w, bf16": ["tinsmith", "dense"],
    },
    "train": {"2×9": ["tinsmith", "HF + PEFT"]},
    "train --custom": {"2×9": ["one forward", "two forwards"]},
    "sample": {side: ["tinsmith", "tinsmith + adapter", "HF"] for side in ("11", "1", "3")},
    "head": {
        "5, gradient 0.00 GiB": ["tinsmith", "torch eager"],
        "9 × 16 × 400": ["tinsmith", "torch eager", "torch chunked", "NumPy"],
        "frozen": ["gather_logprobs", "torch eager", "torch chunked", "NumPy"],
        "trained": ["gather_logprobs", "weighted_cross_entropy", "torch eager", "torch chunked"],
        "9 rows, frozen": ["tinsmith", "torch", "torch, its chunks"],
        "9 rows, trained": ["tinsmith", "torch", "torch, its chunks"],
        "jsd of 5 rows": ["tinsmith", "torch eager"],
        "loss of 9 rows": ["tinsmith", "torch"],
    },
    "dtypes": {
        case: ["float32", "bfloat16"]
        for case in ("forward_backward 1×9", "prefill of 9", "decoding, batch 2")
    },
    "chunks": {f"{size}, 70": ["pages", "chunks"] for size in ("0.8B", "4B", "27B")},
    "distill": {"2 × (3 + 4)": ["tinsmith", "torch"]},
    "memory tokens keep start": {"256": ["tinsmith", "HF + PEFT", "2 / 2"]},
    "recipe": {
        "rollout": ["engine", "the server's rest", "client", "all"],
        "a step": ["engine", "the server's rest", "client", "all"],
        "forward_backward": ["engine"],
    },
    "scaling threads tokens length rank adapters": {
        case: ["tinsmith"] for case in (str(CORES), "4096", "2048", "128", "32", "0")
    },
    "latency": {
        case: ["busy", "idle"]
        for case in ("request", "its result", "create", "snapshot", "save", "open")
    },
    "page": {
        "trains and samples": ["page closed", "curves", "samples", "machine", "no history"],
        **{
            case: ["tinsmith"]
            for case in ("history, of a step", "list", "samples, all new", "samples open")
        },
    },
    "front": {
        "healthz": ["tinsmith"],
        "create_session": ["tinsmith"],
        "sample, 16 + 1 tokens": ["tinsmith"],
        "sample, 16 + 8 × 128 tokens": ["tinsmith"],
        "forward_backward, 1 × 16": ["tinsmith"],
        "forward_backward, 128 × 512, refused": ["tinsmith"],
        "optim_step": ["tinsmith"],
        "snapshot": ["tinsmith"],
        "forward_backward, 1 × 16, 2 idle runs": ["tinsmith"],
        "sample, 16 + 1 tokens, at a replica": ["tinsmith"],
        "sample, 16 + 8 × 128 tokens, at a replica": ["tinsmith"],
        "a step": ["one process", "two replicas"],
    },
    "off_policy": {str(step): ["stable_reinforce", "importance_sampling"] for step in range(3)},
    "load": {"1": ["stored", "int8", "int4"]},
    "start": {
        "first forward_backward": ["tinsmith.Model", "tinsmith serve"],
        "import": ["tinsmith", "tinsmith.server.backend", "numpy", "tinker"],
    },
}


def rows_of(printed: str) -> list[tuple[str, str, list[str]]]:
    """(case, side, the other cells) of every row of the tables."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in printed.splitlines()
        if line.startswith("|")
    ]
    found, case = [], ""
    for first, side, *rest in cells:
        if side in ("side", "---"):
            continue
        case = first or case
        found.append((case, side, rest))
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[NEEDS_BF16] if name == "dtypes" else []) for name in PROGRAMS],
)
def test_program_has_every_row_and_a_plot(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    plot, threads = tmp_path / "plot.svg", torch.get_num_threads()
    program, *extra = name.split()
    options = [*extra, *PROGRAMS[name].split(), "--rounds", "1", "--threads", str(CORES)]
    argv = [str(FOLDER / f"{program}.py"), *options, "--plot", str(plot)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(machine, "measure", measured)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torch sets it if nobody has
    before = dict(os.environ)
    try:
        importlib.import_module(program).main()
    finally:
        torch.set_num_threads(threads)
    assert dict(os.environ) == before  # a test that comes later finds what it would without
    printed = capsys.readouterr().out
    assert f"benchmarks/{program}.py" in printed and machine.processor() in printed
    found = rows_of(printed)
    for case, sides in ROWS[name].items():
        for side in sides:
            cells = [rest for row in found if row[:2] == (case, side) for rest in row[2:]]
            assert cells, f"no row of {case}, {side}"
            assert all(float(rest[0]) >= 0 for rest in cells)
    texts = {e.text for e in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert {side for sides in ROWS[name].values() for side in sides} <= texts
    if program == "sample":
        absent = "llama.cpp is absent: No module named" in printed
        assert absent != HAS_LLAMA
        assert any(side == "llama.cpp" for _, side, _ in found) == HAS_LLAMA


@pytest.mark.parametrize(("model", "kind", "gpus", "first", "rate"), [
    ("8B", "SFT", 2, "GPUs", 12e3 / (32 * 512)),  # the owner's GPU trains nothing
    ("0.6B", "SFT", 1, "GPUs", 150e3 / (32 * 512)),
    ("30B-A3B", "SFT", 64, "weights out", 12.5 / 1.98 / 2),  # to two replicas for each step
])  # fmt: skip
def test_a_simulated_fleet_is_as_fast_as_its_first_queue(
    model: str, kind: str, gpus: int, first: str, rate: float
) -> None:
    fleet = importlib.import_module("fleet")
    costs = fleet.Costs(FOLDER / "front.json")
    found = fleet.Server(fleet.Case(model, kind, gpus, 1), costs, users=100).run()
    assert found[first] > 0.97
    assert 0.95 * rate < found["steps/s"] < 1.03 * rate


def test_scaling_over_threads_asks_for_the_wall(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    argv = [str(FOLDER / "scaling.py"), "threads", "--threads", str(CORES)]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit):
        importlib.import_module("scaling").main()
    assert "threads: CPU seconds add up over threads; give --clock wall" in capsys.readouterr().err


def test_a_program_holds_itself_to_its_threads() -> None:
    if CORES < 2:
        pytest.skip("this machine has one core")
    shown = "import os, peers; a = peers.parse(peers.parser('x')); print(os.sched_getaffinity(0))"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(FOLDER)!r}]; {shown}"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split(",")) == 1, done.stdout


def report(plot: Path | None, monkeypatch: pytest.MonkeyPatch) -> reports.Report:
    """A report whose roofline is 100 flops and 10 bytes a second."""
    most = {"f32": 100.0, "bf16": 200.0}
    monkeypatch.setattr(machine, "measure", lambda n: machine.Roofline(n, most, 10.0))
    options = {"plot": plot, "threads": 2, "clock": "cpu", "rounds": 3, "unit": "s"}
    args = argparse.Namespace(**options, said="medians")
    return reports.Report(args, "A title.")


def test_a_table_says_ratio_and_share_of_the_roofline(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    with report(None, monkeypatch) as made:
        table = made.table("Products", "case", {"s": ".1f", "rows/s": ".0f"})
        table.add("a", {"ours": (4.0, 10.0), "theirs": (8.0, 5.0)}, made.floor(flops=200, bytes=10))
        table.add("b", {"ours": (4.0, 1.0), "theirs": (math.nan, math.nan)}, made.floor(bytes=30))
        table.add("c", {"ours": (2.0, 1.0), "theirs": (1.0, 2.0)})
    assert rows_of(capsys.readouterr().out) == [
        ("a", "ours", ["4.0", "10", "1.00", "50 compute"]),
        ("a", "theirs", ["8.0", "5", "2.00", "25 compute"]),
        ("b", "ours", ["4.0", "1", "1.00", "75 memory"]),
        ("b", "theirs", ["–", "–", "–", "–"]),
        ("c", "ours", ["2.0", "1", "1.00", "–"]),
        ("c", "theirs", ["1.0", "2", "0.50", "–"]),
    ]
    assert made.roofline.threads == 1  # CPU seconds, though of two threads
    assert made.floor(flops=200, dtype="bf16", scale=1e3) == reports.Floor(1000.0, "compute")
    assert [table.limit(index) for index in (0, 1)] == [0.5, 0.75]  # of ours, in what is drawn


def test_cases_that_are_numbers_are_curves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    with report(plot, monkeypatch) as made:
        table = made.table("Peak", "tokens", {"GiB": ".1f"}, plot="GiB")
        for tokens in (256, 512, 1024):
            table.add(tokens, {"ours": (tokens / 512,), "theirs": (tokens / 128,)})
    texts = {e.text for e in ElementTree.parse(plot).iter("{http://www.w3.org/2000/svg}text")}
    assert {"ours", "theirs", "tokens", "GiB", "1024", "A title"} <= texts


def test_without_a_compiler_there_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert "a C compiler" in str(machine.measure())
    assert os.environ["PATH"] == str(tmp_path)


def test_the_roofline_is_one_of_a_processor() -> None:
    found = measured()
    assert isinstance(found, machine.Roofline), found
    # AMD's cores make twice as many multiply-adds of bf16 pairs as of f32, Intel's half as many,
    # and a matrix unit 16 times as many.
    most = 32 if cpu_has("amx") else 3
    assert found.flops["f32"] / 3 < found.flops["bf16"] < found.flops["f32"] * most
    assert 1e9 < found.flops["f32"] < 1e13 and 1e8 < found.bytes < 1e12


def test_numpy_makes_the_gradient_that_torch_makes() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape) for shape in ((4, 6), (11, 6)))
    ids = np.array([[1, 1], [0, 10], [3, 4], [5, 5]])
    rows = torch.from_numpy(x).requires_grad_()
    logprobs = torch.log_softmax(rows @ torch.from_numpy(w).T, -1)
    logprobs.gather(-1, torch.from_numpy(ids)).sum().backward()
    found = importlib.import_module("head").gather_in_numpy(x, w, ids)
    np.testing.assert_allclose(found, rows.grad.numpy(), rtol=1e-12, atol=1e-12)


def test_gguf_of_a_hybrid_has_the_value_heads_of_one_key_head_apart() -> None:
    sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 2}
    layer = "model.layers.0.linear_attn."
    bias = llama.hybrid(sizes, f"{layer}dt_bias", np.float32([0, 1, 2, 3]))
    assert bias.tolist() == [0, 2, 1, 3]
    # q and k of 2 heads, 1 wide, then v's rows
    rows = llama.hybrid(sizes, f"{layer}in_proj_qkv.weight", np.arange(12)[:, None])
    assert rows[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 8, 9, 6, 7, 10, 11]
    columns = llama.hybrid(sizes, f"{layer}out_proj.weight", np.arange(8)[None])
    assert columns[0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    norm = llama.hybrid(sizes, "model.layers.0.input_layernorm.weight", np.float32([0.5]))
    assert norm.tolist() == [1.5]


def test_gguf_names() -> None:
    names = ("model.layers.3.self_attn.q_norm.weight", "model.embed_tokens.weight")
    wanted = ["blk.3.attn_q_norm.weight", "token_embd.weight"]
    assert [llama.gguf_name(name) for name in names] == wanted
    nested = [name.replace("model.", "model.language_model.", 1) for name in names]
    assert [llama.gguf_name(name, hybrid=True) for name in nested] == wanted
    bias = llama.gguf_name("model.layers.2.linear_attn.dt_bias", hybrid=True)
    assert bias == "blk.2.ssm_dt.bias"
