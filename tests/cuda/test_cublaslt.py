"""The CUDA device's use of cuBLASLt (cuda/product/cublaslt.cuh), against the stand-in that the
emulated device loads (cublaslt.cpp): which algorithms it takes, what it does where there is none,
and how it looks for the library; and the algorithms that it chooses for buckets of rows
(cuda/product/buckets.cuh). And the stand-in itself: it refuses each misuse that it is there to
find."""

import ctypes
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
import tinsmith
from support.emulated_card import emulated_card
from support.op_cases import CASES
from support.op_devices import Bound, Device, Frozen, device, emulated_library
from support.op_tolerance import compare
from support.tiny_models import call, datum, randomize, tokens_of
from support.tiny_models import folder as folder_of
from tinsmith import _core
from tinsmith.checkpoints.optimizers import AdamParams
from tinsmith.engine import runs
from tinsmith.engine.devices import say
from tinsmith.engine.engine import Engine
from tinsmith.engine.training import OptimJob
from tinsmith.models.registry import load_model

ALL, TEMPTING, NOTHING, FAITHLESS, SEVERAL, UNSTEADY = range(6)  # the stand-in's Offer
PLAIN, _, QUICK, MIDDLE, _, _, _, _, CHANGING = range(9)  # the algorithms of SEVERAL
INVALID, NOT_SUPPORTED = 7, 15
VOID = ctypes.c_void_p
OPS = ("linear", "linear_backward", "head", "matmul")
WIDTH = {"linear": "N", "linear_backward": "D", "head": "V"}  # of a row of the result
RESULT = {"linear": ("y", "x"), "linear_backward": ("dx", "dy"), "head": ("logits", "x")}


def stand_in() -> ctypes.CDLL:
    library = ctypes.CDLL(str(emulated_library().with_name("libcublasLt_stand_in.so")))
    library.cublaslt_said.restype = ctypes.c_char_p
    return library


@pytest.fixture
def offer() -> Iterator[Callable[[int], Device]]:
    """Sets what the stand-in offers, and gives a device that has no algorithm yet."""
    library = stand_in()

    def chosen(kind: int) -> Device:
        library.cublaslt_offer(kind)
        return Device("cuda-emulated")

    yield chosen
    library.cublaslt_offer(ALL)


def controls() -> ctypes.CDLL:
    library = ctypes.CDLL(str(emulated_library()))
    library.cuda_emulated_used.restype = ctypes.c_size_t
    return library


def linear(dev: Device, T: int, **sizes: Any) -> np.ndarray:
    """Rows of one product of 9 rows: those that there are for a smaller T are the same."""
    args = CASES["linear"][0](np.random.default_rng(0), **{"N": 40, "D": 200} | sizes, T=9)
    args |= {"x": args["x"][:T], "y": (T, 40), "T": T}
    return dev.call("linear", **args)["y"]


# ---- which algorithm ----


@pytest.mark.parametrize("rehearsed", (True, False))
def test_only_an_algorithm_whose_rows_keep_their_bits_is_taken(
    offer: Callable[[int], Device], rehearsed: bool
) -> None:
    """One that splits k, one that wants memory and one that refuses single rows come first. Without
    a rehearsal nothing is tried, and what cuBLASLt says of them must do."""
    plain = linear(offer(ALL), 9, dtype="bf16", bias=0)
    dev = offer(TEMPTING)
    if not rehearsed:
        dev.c.rehearse = type(dev.c.rehearse)()
    for T in (9, 1, 2, 4):
        np.testing.assert_array_equal(linear(dev, T, dtype="bf16", bias=0), plain[:T])
        assert ran()[-1] == (PLAIN, T, 0)


@pytest.mark.parametrize("op", OPS)
def test_where_there_is_no_algorithm_our_own_kernel_makes_the_product(
    offer: Callable[[int], Device], op: str
) -> None:
    build, sizes = CASES[op]
    dev = offer(NOTHING)
    for number, size in enumerate(sizes):
        compare(dev, op, build(np.random.default_rng(number), **size))
    assert all("cuBLASLt has no algorithm for them that keeps" in note for note in dev.notes)
    assert dev.notes


def test_a_slow_kernel_is_told_once(
    offer: Callable[[int], Device], capsys: pytest.CaptureFixture[str]
) -> None:

    for kind in (ALL, NOTHING):
        offer(kind)
        loaded = load_model(folder_of("qwen3"), device="cuda-emulated")
        adapter = randomize(_core.Adapter(loaded.core, rank=4))
        call(adapter, [datum(tokens_of("qwen3", 5))])
        for _ in range(2):
            job = OptimJob(AdamParams(learning_rate=0.01))
            job.submitted("run", 1, lambda _: None)
            job.run(runs.Run("run", loaded, adapter), Engine({}))
        assert bool(adapter.model.notes) == (kind == NOTHING)
    notes = adapter.model.notes
    assert len(notes) == len(set(notes)) > 4
    assert capsys.readouterr().err == "".join(f"tinsmith: {note}\n" for note in notes)
    say.cache_clear()
    with tinsmith.Model(folder_of("qwen3"), device="cuda-emulated") as model:
        model.sampler().sample(tokens_of("qwen3", 5), max_tokens=2)
    assert "are made by our own kernel, which is slower" in capsys.readouterr().err


def test_our_own_kernels_rows_keep_their_bits(offer: Callable[[int], Device]) -> None:
    dev = offer(NOTHING)
    whole = linear(dev, 9, dtype="bf16", bias=1)
    for T in (1, 2, 5):
        np.testing.assert_array_equal(linear(dev, T, dtype="bf16", bias=1), whole[:T])


TILES = (  # rows, width and depth: several wide tiles, few rows, few tiles, odd addresses
    (260, 136, 200),
    (16, 200, 264),
    (40, 72, 136),
    (131, 141, 99),
)


@pytest.mark.parametrize("rows, width, depth", TILES)
def test_our_own_kernel_makes_every_tiling(
    offer: Callable[[int], Device], rows: int, width: int, depth: int
) -> None:
    dev, rng = offer(NOTHING), np.random.default_rng(rows)
    build = {op: CASES[op][0] for op in OPS}
    few = {"T": rows, "N": width, "D": depth, "dtype": "bf16"}
    compare(dev, "linear", build["linear"](rng, **few, bias=1, plus="rows", gap=8))
    compare(dev, "linear_backward", build["linear_backward"](rng, **few, accumulate=1, gap=8))
    compare(dev, "head", build["head"](rng, T=rows, V=width, D=depth, dtype="bf16"))
    for turned in itertools.product((0, 1), repeat=2):
        sizes = {"M": width, "N": depth, "K": rows, "b_bf16": turned[0], "accumulate": turned[1]}
        args = build["matmul"](rng, **sizes, a_turned=turned[0], b_turned=turned[1])
        compare(dev, "matmul", args)


@pytest.mark.parametrize("op", WIDTH)
def test_a_row_has_the_same_bits_in_all_tilings(offer: Callable[[int], Device], op: str) -> None:
    dev, sizes = offer(NOTHING), {"V" if op == "head" else "N": 200, "D": 136}
    whole = rows_of(dev, op, 260, **sizes)
    for rows in (1, 2, 16, 17, 40, 129):
        np.testing.assert_array_equal(rows_of(dev, op, rows, **sizes), whole[:rows])


def test_an_algorithm_that_is_refused_later_is_not_used_again(
    offer: Callable[[int], Device],
) -> None:
    dev = offer(FAITHLESS)
    exact = linear(device("cpu"), 9, dtype="bf16", bias=0)
    for T in (9, 3, 9, 3):  # the second of them is refused
        found = linear(dev, T, dtype="bf16", bias=0)
        np.testing.assert_allclose(found, exact[:T], rtol=0.02, atol=0.2)
    np.testing.assert_array_equal(linear(dev, 9, dtype="bf16", bias=0)[:3], found)
    assert dev.notes == [
        "cuda-emulated: products of width 40 and depth 200 are made by our own kernel, which is "
        "slower, because cuBLASLt refused its own algorithm for some numbers of rows"
    ]


@pytest.mark.parametrize("accumulate", (0, 1))
def test_a_product_without_terms_is_zero(offer: Callable[[int], Device], accumulate: int) -> None:
    c = np.ones((3, 5), np.float32) if accumulate else (3, 5)
    empty = np.zeros((0, 8), np.float32)
    args = {"a": empty, "b": empty, "a_turned": 0, "b_turned": 0, "b_bf16": 0, "M": 3, "N": 5}
    found = offer(ALL).call("matmul", c=c, **args, K=0, accumulate=accumulate)["c"]
    np.testing.assert_array_equal(found, np.full((3, 5), accumulate))


def test_the_smallest_product_with_a_bias(offer: Callable[[int], Device]) -> None:
    for kind in (ALL, NOTHING):
        args = CASES["linear"][0](np.random.default_rng(3), T=1, N=1, D=1, dtype="bf16", bias=1)
        compare(offer(kind), "linear", args)


# ---- buckets of rows ----

ENDS = (1, 2, 16, 17, 64, 65, 256, 257, 1024, 1025, 8192)  # of all buckets


class Run(ctypes.Structure):
    """The stand-in's."""

    _fields_ = [(name, ctypes.c_int32) for name in ("name", "cols", "captured")]


def ran() -> list[tuple[int, int, int]]:
    """Name, columns and whether it was captured, of the products since the last call."""
    runs = (Run * 4000)()
    count = stand_in().cublaslt_ran(runs, len(runs))
    assert count <= len(runs)
    return [(run.name, run.cols, run.captured) for run in runs[:count]]


def rows_of(dev: Device, op: str, T: int, **sizes: Any) -> np.ndarray:
    """The first T of 8,192 rows."""
    args = CASES[op][0](np.random.default_rng(1), T=8192, dtype="bf16", **sizes)
    result, operand = RESULT[op]
    args |= {operand: args[operand][:T], "T": T}
    args[result] = (T, args[WIDTH[op]])
    if args.get("plus") is not None:
        args["plus"] = args["plus"][:T]
    return dev.call(op, **args)[result]


@pytest.mark.parametrize(
    ("op", "sizes", "ends"),
    [
        ("linear", {"N": 5, "D": 24, "bias": 0}, ENDS),
        ("linear", {"N": 6, "D": 17, "bias": 1, "plus": "rows", "gap": 7}, ENDS[3:7]),
        ("linear_backward", {"N": 24, "D": 5}, ENDS[:6]),
        ("head", {"V": 5, "D": 24}, ENDS[2:5]),
    ],
)
def test_each_bucket_has_the_fastest_algorithm_of_the_references_bits(
    offer: Callable[[int], Device], op: str, sizes: dict[str, int], ends: tuple[int, ...]
) -> None:
    """Faster ones sum in another order: always, with the fewest rows of a bucket or with the most
    alone. Others are refused, when they are asked for or when they are used."""
    whole = rows_of(offer(ALL), op, ends[-1], **sizes)
    dev = offer(SEVERAL)
    for T in ends:
        np.testing.assert_array_equal(rows_of(dev, op, T, **sizes), whole[:T])
        name, cols, _ = ran()[-1]
        assert (name, cols) == (QUICK if T <= 64 else MIDDLE, T)
    assert dev.notes == []


def test_a_choice_is_made_once_for_all_weights_of_a_shape(offer: Callable[[int], Device]) -> None:
    dev, tried = offer(SEVERAL), []
    for seed, scale in ((0, 0.0), (1, 1.0), (2, 3.0)):
        args = CASES["linear"][0](np.random.default_rng(seed), T=5, N=40, D=24, dtype="bf16")
        args["w"] = Frozen(args["w"].value * scale, "bf16")
        dev.call("linear", **args)
        tried.append(len(ran()))
    assert tried[0] > 30 and tried[1:] == [1, 1]


def test_a_reference_whose_rows_change_is_given_up(offer: Callable[[int], Device]) -> None:
    """With 200 rows and more it sums in another order. Five rows would not have shown it."""
    sizes = {"N": 5, "D": 24, "bias": 0}
    wanted = rows_of(offer(ALL), "linear", 300, **sizes)
    dev = offer(UNSTEADY)
    for T, chosen in ((5, QUICK), (300, MIDDLE)):
        np.testing.assert_array_equal(rows_of(dev, "linear", T, **sizes), wanted[:T])
        runs = ran()
        assert runs[0][0] == (CHANGING if T == 5 else PLAIN) and runs[-1] == (chosen, T, 0)


def bound(dev: Device, rows: int = 20) -> Bound:
    args = CASES["linear"][0](np.random.default_rng(0), T=rows, N=40, D=24, dtype="bf16", bias=0)
    return dev.bind("linear", args)


def run(product: Bound, T: int) -> np.ndarray:
    """Makes the product of the first T rows, without a rehearsal."""
    dev = product.device
    ordered = list(product.ordered)
    ordered[[p.name for p in product.params].index("T")] = T
    dev.c.linear(dev.pointer, *ordered)
    return dev.decode(product.memory["y"].read(T * 80), "real", (T, 40))


def prepare(product: Bound, T: int) -> None:
    dev = product.device
    ordered = list(product.ordered)
    ordered[[p.name for p in product.params].index("T")] = T
    dev.c.rehearse(dev.pointer)
    dev.c.linear(dev.pointer, *ordered)
    dev.check(dev.c.reserve(dev.pointer, dev.c.rehearsed(dev.pointer)))


def test_nothing_is_chosen_while_work_is_recorded(offer: Callable[[int], Device]) -> None:
    """A product that was never rehearsed is recorded with its reference, also if it was asked for
    before and its choice is still to be made."""
    dev, graph = offer(SEVERAL), ctypes.c_void_p()
    product = bound(dev)
    wanted = run(product, 20)
    ran()
    dev.check(dev.c.record(dev.pointer))
    dev.c.rehearse(dev.pointer)
    dev.c.linear(dev.pointer, *product.ordered[:-4], 4, *product.ordered[-3:])
    dev.check(dev.c.reserve(dev.pointer, dev.c.rehearsed(dev.pointer)))
    dev.c.linear(dev.pointer, *product.ordered[:-4], 4, *product.ordered[-3:])
    dev.check(dev.c.recorded(dev.pointer, ctypes.byref(graph)))
    assert ran() == [(PLAIN, 4, 1)]
    product.memory["y"].write(np.zeros(4 * 80, np.uint8))
    assert dev.c.replay(dev.pointer, graph) == 1
    found = dev.decode(product.memory["y"].read(4 * 80), "real", (4, 40))
    np.testing.assert_array_equal(found, wanted[:4])
    prepare(product, 4)
    assert len(ran()) > 30
    np.testing.assert_array_equal(run(product, 4), wanted[:4])
    assert ran() == [(QUICK, 4, 0)]
    dev.c.graph_close(dev.pointer, graph)


def test_where_there_is_no_memory_the_reference_serves(offer: Callable[[int], Device]) -> None:
    """The step that was about to begin goes on, and nothing stays allocated. The next rehearsal
    tries again."""
    library = controls()
    product = bound(offer(SEVERAL))
    wanted, used = run(product, 20), library.cuda_emulated_used(0)
    with emulated_card() as card:
        card(1000)
        prepare(product, 4)
    ran()
    np.testing.assert_array_equal(run(product, 4), wanted[:4])
    assert ran() == [(PLAIN, 4, 0)]
    prepare(product, 17)  # chosen before
    assert not ran()
    prepare(product, 4)
    assert len(ran()) > 30 and library.cuda_emulated_used(0) == used
    np.testing.assert_array_equal(run(product, 4), wanted[:4])
    assert ran() == [(QUICK, 4, 0)]


# ---- the log ----


def test_each_choice_is_a_line_of_the_log(tmp_path: Path) -> None:
    """With which library, of which product, what each candidate is and did, and which was taken."""
    log = tmp_path / "choice.jsonl"
    code = "__import__('test_cublaslt').chosen_rows()"
    assert process(emulated_library().parent, code, TINSMITH_CUDA_LOG=str(log)) == [QUICK, MIDDLE]
    many, few = (json.loads(line) for line in log.read_text().splitlines())
    assert (few["rows"], many["rows"]) == ([1, 16], [257, 1024])
    for line, chosen in ((few, QUICK), (many, MIDDLE)):
        assert line["library"].startswith("cuBLASLt 13.2.7 (") and line["process"] > 1
        assert (line["width"], line["depth"], line["result"], line["weight"]) == (
            *(40, 24, "bf16", "turned"),
        )
        assert line["reference"]["id"] == PLAIN and line["why"].startswith("the fastest of the")
        assert line["chosen"]["id"] == chosen and line["chosen"]["trials"] == len(line["trials"])
        how = {trial["id"]: trial["how"] for trial in line["trials"]}
        assert how[PLAIN] == "reference" and how[chosen] == "same bits"
        assert how[CHANGING] == ("same bits" if line is few else "other bits, or refused")
        times = {trial["id"]: trial["us"] for trial in line["trials"] if "us" in trial}
        assert line["chosen"]["us"] == times[chosen] == min(times.values())
        assert {"tile", "stages", "cluster"} <= set(line["trials"][0])


def chosen_rows() -> list[int]:
    """The algorithms that a process of its own takes for 9 rows and for 300 of one product."""
    emulated_library()
    stand_in().cublaslt_offer(SEVERAL)
    product, names = bound(Device("cuda-emulated"), 300), []
    for rows in (9, 300):
        prepare(product, rows)
        run(product, rows)
        names.append(ran()[-1][0])
    return names


def test_without_memory_the_log_says_so(tmp_path: Path) -> None:
    log = tmp_path / "choice.jsonl"
    code = "__import__('test_cublaslt').without_memory()"
    process(emulated_library().parent, code, TINSMITH_CUDA_LOG=str(log))
    _, first, second = (json.loads(line) for line in log.read_text().splitlines())
    assert first["why"] == "no memory to try others: the next rehearsal tries again"
    assert first["chosen"]["id"] == PLAIN and not first["trials"]
    assert second["chosen"]["id"] == QUICK


def without_memory() -> None:
    emulated_library()
    stand_in().cublaslt_offer(SEVERAL)
    product = bound(Device("cuda-emulated"))
    with emulated_card() as card:
        card(1000)
        prepare(product, 4)
    prepare(product, 4)


def test_a_log_that_can_not_be_written_is_refused() -> None:
    sentence = opened(
        emulated_library().parent, "cuda-emulated", TINSMITH_CUDA_LOG="/nowhere/choice.jsonl"
    )
    assert "TINSMITH_CUDA_LOG names a file that can't be written: /nowhere/choice.jsonl" in sentence


# ---- finding it ----


def process(folder: Path, code: str, **environment: str) -> Any:
    """What code gives in a process of its own; `folder` has the emulated device."""
    code = (
        "import ctypes, json, sys; from tinsmith import _core; "
        "from tinsmith.models.registry import load_model; "
        "core = ctypes.CDLL(_core.__file__); "
        "core.device_emulated.argtypes = [ctypes.c_char_p]; "
        f"core.device_emulated({os.fsencode(folder / 'device.so')!r}); "
        f"print(json.dumps({code}))"
    )
    env = support.environment() | environment
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent, env=env, capture_output=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def opened(folder: Path, name: str, **environment: str) -> str:
    """The sentence of opening a device."""
    return process(folder, f"_core.devices({name!r})", **environment)[name]


def noted(folder: Path, **environment: str) -> dict[str, Any]:
    """What a model on the emulated device says of its products."""
    loaded = f"load_model({str(folder_of('qwen3'))!r}, device='cuda-emulated').core"
    code = f"(lambda core: {{'library': core.library, 'notes': core.notes}})({loaded})"
    return process(folder, code, **environment)


def test_a_library_that_is_nowhere_is_told_with_the_places(tmp_path: Path) -> None:
    shutil.copy(emulated_library(), tmp_path / "device.so")
    said = noted(tmp_path)
    assert said["library"] == "" and len(said["notes"]) == 1
    assert "our own kernel makes all products, which is slower" in said["notes"][0]
    assert "libcublasLt_stand_in.so was not found: pip install 'tinsmith[cuda]'" in said["notes"][0]
    assert "TINSMITH_CUBLASLT" in said["notes"][0] and "/usr/local/cuda" in said["notes"][0]
    assert str(support.TESTS) in said["notes"][0]  # one of the folders of packages


def test_the_library_that_a_variable_names_is_taken_and_told(tmp_path: Path) -> None:
    library = emulated_library()
    shutil.copy(library, tmp_path / "device.so")
    named = str(shutil.copy(library.with_name("libcublasLt_stand_in.so"), tmp_path / "other.so"))
    said = noted(tmp_path, TINSMITH_CUBLASLT=named)
    assert said == {"library": f"cuBLASLt 13.2.7 ({named})", "notes": []}


def test_no_library_may_be_wanted() -> None:
    said = noted(emulated_library().parent, TINSMITH_CUBLASLT="none")
    sentence = "cuda-emulated: our own kernel makes all products: TINSMITH_CUBLASLT is none"
    assert said == {"library": "", "notes": [sentence]}


def test_without_a_library_every_product_is_right() -> None:
    code = "__import__('test_cublaslt').all_products()"
    done = process(emulated_library().parent, code, TINSMITH_CUBLASLT="none")
    assert done == {"products": sum(len(CASES[op][1]) for op in OPS), "cuBLASLt's": 0}


def all_products() -> dict[str, int]:
    """Compares them in a process of its own."""
    emulated_library()
    dev, count = Device("cuda-emulated"), 0
    for op in OPS:
        build, sizes = CASES[op]
        for number, size in enumerate(sizes):
            compare(dev, op, build(np.random.default_rng(number), **size))
            count += 1
    return {"products": count, "cuBLASLt's": len(ran())}


@pytest.mark.parametrize("named", ("/nowhere/libcublasLt.so.13", __file__))
def test_a_variable_that_names_no_library_is_refused(named: str) -> None:
    folder = emulated_library().parent
    sentence = opened(folder, "cuda-emulated", TINSMITH_CUBLASLT=named)
    assert f"TINSMITH_CUBLASLT names a file that can't be loaded: {named}" in sentence


# ---- the stand-in refuses what is wrong ----


class Lt:
    """A product of the stand-in's, step by step, as cublaslt.cuh asks for one; any number of it can
    be given wrong."""

    def __init__(self) -> None:
        self.library, self.made = stand_in(), []

    def __getattr__(self, name: str) -> Callable[..., int]:
        return getattr(self.library, f"cublasLt{name}")

    def new(self, name: str, *arguments: Any) -> VOID:
        made = VOID()
        assert self.__getattr__(f"{name}Create")(ctypes.byref(made), *arguments) == 0, self.said()
        return made

    def said(self) -> str:
        return self.library.cublaslt_said().decode()

    def product(self, **wrong: Any) -> int:
        """The first status that is not 0."""
        m, n, k = 24, 3, 16
        right = {"compute": 68, "scale": 0, "type": 14, "ld": k, "ldb": k, "depth": k, "size": 4}
        right |= {"cols": n, "pointer": 8, "workspace": 8, "align": 16, "align_size": 4}
        of = right | wrong
        desc, turned, one = VOID(), ctypes.c_int(1), ctypes.c_uint64(of["cols"])
        status = self.MatmulDescCreate(ctypes.byref(desc), of["compute"], of["scale"])
        status = status or self.MatmulDescSetAttribute(desc, 3, ctypes.byref(turned), of["size"])
        pointer, epilogue = VOID(64), ctypes.c_int(4)
        if "pointer" in wrong:
            status = status or self.MatmulDescSetAttribute(desc, 7, ctypes.byref(epilogue), 4)
            size = ctypes.c_size_t(of["pointer"])
            status = status or self.MatmulDescSetAttribute(desc, 8, ctypes.byref(pointer), size)
        a, b, c = VOID(), VOID(), VOID()
        sizes = ((a, k, m, of["ld"]), (b, of["depth"], n, of["ldb"]), (c, m, n, m))
        for layout, rows, cols, ld in sizes:
            kind = 14 if layout is c else of["type"]
            numbers = (ctypes.c_uint64(rows), ctypes.c_uint64(cols), ctypes.c_int64(ld))
            status = status or self.MatrixLayoutCreate(ctypes.byref(layout), kind, *numbers)
        status = status or self.MatrixLayoutSetAttribute(b, 3, ctypes.byref(one), 8)
        preference = self.new("MatmulPreference")
        none, align = ctypes.c_uint64(0), ctypes.c_int(of["align"])
        for attribute, value, size in (
            *((1, none, of["workspace"]), (3, none, 4)),
            *((5 + i, align, of["align_size"]) for i in range(4)),
        ):
            status = status or self.MatmulPreferenceSetAttribute(
                preference, attribute, ctypes.byref(value), ctypes.c_size_t(size)
            )
        found, count = (ctypes.c_uint64 * 12)(), ctypes.c_int()
        return status or self.MatmulAlgoGetHeuristic(
            None, desc, a, b, c, c, preference, 1, found, ctypes.byref(count)
        )


def test_the_stand_in_takes_a_product_that_is_right() -> None:
    assert Lt().product() == 0


MISUSES = {
    "a transposition of 8 bytes": ({"size": 8}, "TRANSA has 4 bytes, not 8"),
    "a bias pointer of 4 bytes": ({"pointer": 4}, "BIAS_POINTER has 8 bytes, not 4"),
    "a workspace of 4 bytes": ({"workspace": 4}, "WORKSPACE has 8 bytes, not 4"),
    "an alignment of 8 bytes": ({"align_size": 8}, "ALIGNMENT has 4 bytes, not 8"),
    "an alignment that is none": ({"align": 12}, "an alignment of 12 bytes"),
    "half-precision sums": ({"compute": 64}, "computes in type 64"),
    "operands of f32": ({"type": 0}, "operands that are not bf16"),
    "columns that overlap": ({"ld": 15}, "columns of 16 elements lie 15 apart"),
    "depths that differ": ({"depth": 15}, "A has 16 k, B has 15"),
    "columns that differ": ({"cols": 4}, "C is 24 by 3, A and B make 24 by 4"),
    "no columns": ({"cols": 0}, "a matrix without columns"),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_the_stand_in_refuses_a_misuse(misuse: str) -> None:
    wrong, sentence = MISUSES[misuse]
    lt = Lt()
    assert lt.product(**wrong) == INVALID
    assert sentence in lt.said()
