"""What a wrong result tells (wrong_results.py): slips are planted, and told where they were
planted."""

# ruff: noqa: C408 - sizes are keyword arguments, and read as such

import json
import os

import numpy as np
import pytest
from support import op_reference, op_tolerance, wrong_results
from support.case_seed import Case, case_of
from support.expert_cases import CASES
from support.leftovers import VARIABLE
from support.op_cases import make_attention, make_rmsnorm, make_sample
from support.op_devices import UNWRITTEN, Param, device

NOBODYS = Case("7", {"T": 3})


@pytest.fixture(params=("cpu", "cuda", "cuda-emulated"))
def dev(request):
    return device(request.param)


def output(got, exact, allowed=1e-6, name="y"):
    found = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    return wrong_results.Output(name, got, exact, found, allowed, exact.astype(np.float32))


def drawn_result(shape, seed=0):
    exact = np.random.default_rng(seed).standard_normal(shape)
    return exact.astype(np.float32), exact


# ---- which elements ----


@pytest.mark.parametrize("wide", (1.0, 1e4))
def test_planted_elements_are_wrong_and_no_other(wide):
    """Also where rows differ in size: a small element may err as the large ones do."""
    got, exact = drawn_result((64, 300))
    exact *= np.geomspace(1 / wide, wide, 64)[:, None]
    noise = np.random.default_rng(1).standard_normal(exact.shape)
    got = (exact + noise * np.sqrt(np.mean(exact**2)) * 1e-6).astype(np.float32)
    got[5, 17], got[40, 3], got[63, 299] = np.nan, got[40, 3] + 1.0, np.inf
    exact[9, 9], got[9, 9] = -np.inf, np.inf
    exact[9, 10] = got[9, 10] = -np.inf
    mask, times = wrong_results.wrong_elements(got, exact, 1e-6)
    assert times == wrong_results.FAR
    assert np.argwhere(mask).tolist() == [[5, 17], [9, 9], [40, 3], [63, 299]]


@pytest.mark.parametrize("heavy", (False, True))
def test_an_error_above_the_bar_has_wrong_elements_however_it_is_spread(heavy):
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((30, 40)) ** (5 if heavy else 1)
    for noise in (np.ones(exact.shape), np.abs(exact), rng.random(exact.shape)):
        noise = noise / np.linalg.norm(noise) * np.linalg.norm(exact) * 1.0001e-3
        mask, times = wrong_results.wrong_elements(exact + noise, exact, 1e-3)
        assert mask.any() and times == wrong_results.SPREAD
    zeros = np.zeros((3, 4))
    assert wrong_results.wrong_elements(zeros + 1e-3, zeros, 1e-4)[0].all()


def test_remainders_are_told_in_runs():
    assert wrong_results.remainders(np.arange(64), 64) == "0-63 ×1"
    assert wrong_results.remainders(np.array([0, 1, 16, 17, 40]), 16) == "0-1 ×2, 8 ×1"
    assert wrong_results.remainders(np.arange(0, 64, 2), 64).endswith(", 22 ×1, and 20 more")


# ---- what is told ----


def test_where_a_result_is_wrong_is_told():
    got, exact = drawn_result((70, 2, 96))
    got[33, 1, 64:72] = exact[33, 1, 64:72] + 1.0  # row 67
    got[41, 1, 64:72] = UNWRITTEN  # row 83
    got[41, 1, 71] = np.nan
    lines = wrong_results.told(output(got, exact)).splitlines()
    assert "16 of 13440 elements" in lines[1]
    assert "in 2 of 140 rows, 8 of 96 columns; 8 are NaN; 7 are what was there" in lines[1]
    assert lines[2].strip() == "rows mod 16: 3 ×2; mod 64: 3 ×1, 19 ×1"
    assert lines[3].strip() == "columns mod 8: 0-7 ×1; mod 64: 0-7 ×1"
    assert lines[4].strip() == "first axis mod 16: 1 ×1, 9 ×1; mod 64: 33 ×1, 41 ×1"
    assert len(lines) == 5 + wrong_results.FIRST
    assert lines[5].strip() == f"(33, 1, 64): {got[33, 1, 64]:.9g}, exact {exact[33, 1, 64]:.9g}"


def test_whole_numbers_that_differ_are_told():
    exact = np.arange(12, dtype=np.int64).reshape(3, 4)
    got = exact.astype(np.int32)
    got[2, 1], got[2, 2] = 0x7F7F7F7F, 3
    text = wrong_results.told(wrong_results.Output("ids", got, exact, np.inf, 0.0))
    assert "wrong: 2 of 12 elements, in 1 of 3 rows, 2 of 4 columns" in text
    assert "1 are what was there before the op" in text
    assert "(2, 2): 3, exact 10" in text


def test_another_shape_is_told():
    got, exact = drawn_result((3, 4))
    assert "has shape (4,), and not (3, 4)" in wrong_results.told(
        wrong_results.Output("y", got[0], exact, 1, 1)
    )


@pytest.mark.parametrize("kind", ("real", "float", "int32_t"))
def test_what_no_op_has_written_is_known(dev, kind):
    shape, dtype = (3, 5), dev.element(kind)
    memory, _ = dev.place(Param("y", kind, True, False), shape)
    found = dev.decode(memory.read(15 * dtype.itemsize), kind, shape)
    assert wrong_results.unwritten(found).all()
    assert kind == "int32_t" or np.isnan(found).all()
    with np.errstate(invalid="ignore"):
        computed = np.float32([np.inf, np.inf, 1.0]) - np.float32([np.inf, -np.inf, np.nan])
    assert not wrong_results.unwritten(dev.decode(dev.encode(computed, "real"), "real", (3,))).any()


def planted(monkeypatch, op, change):
    """Makes the reference of an op wrong: the device's result is, then."""
    formula = getattr(op_reference, op)

    def other(**args):
        out = formula(**args)
        change(out)
        return out

    monkeypatch.setattr(op_reference, op, other)


def test_an_ops_case_is_told(dev, monkeypatch):
    planted(monkeypatch, "rmsnorm", lambda out: out["y"].__setitem__((3, 66), 50.0))
    args = make_rmsnorm(np.random.default_rng(11), T=7, D=67)
    make_attention(np.random.default_rng(2), ((1, 0),), 1, 1, 2)
    with pytest.raises(AssertionError) as failure:
        op_tolerance.compare(dev, "rmsnorm", args)
    first, *rest = str(failure.value).splitlines()
    assert first.startswith("rmsnorm: y ") and "rstd" not in first
    assert first.endswith(f" on {dev.name} in process {os.getpid()}, seed 11: T=7, D=67")
    assert any(line.strip().startswith("(3, 66): ") and "exact 50" in line for line in rest)


def test_a_case_is_known_by_its_arrays():
    rng = np.random.default_rng(5)
    args = make_rmsnorm(rng, T=4, D=9)
    assert case_of("rmsnorm", args | dict(eps=1.0)) == Case("5", dict(T=4, D=9))
    changed = case_of("rmsnorm", args | dict(x=args["x"][:2], T=2))
    assert changed == Case("5 (and changed)", dict(T=4, D=9))
    again = make_rmsnorm(rng, T=4, D=9)
    assert case_of("rmsnorm", again).seed == "5 (after other draws)"
    assert case_of("rmsnorm", args).seed == "not known"
    assert case_of("rmsnorm", args).sizes == {name: args[name] for name in ("T", "D", "eps")}
    spans = ((2, 5), (1, 70))
    args = make_attention(np.random.default_rng(3), spans, 4, 2, E=34, window=7)
    assert case_of("attention", args).sizes == dict(spans=spans, H=4, G=2, E=34, window=7)


def test_a_case_of_every_op_is_known():
    for op, (build, sizes) in CASES.items():
        args = build(np.random.default_rng(77), **sizes[-1])
        assert case_of(op, args) == Case("77", sizes[-1])


def test_all_cases_are_tried_and_all_wrong_ones_are_told():
    tried = []

    def attempt(number):
        tried.append(number)
        if number % 2:
            raise AssertionError(f"case {number}\nmore of {number}")

    with pytest.raises(AssertionError) as failure:
        wrong_results.all_of(lambda n=n: attempt(n) for n in range(6))
    assert tried == list(range(6))
    told = str(failure.value)
    assert "case 1\nmore of 1" in told and "3 of 6 are wrong" in told
    assert "case 3" in told and "case 5" in told and "more of 3" not in told
    wrong_results.all_of([lambda: attempt(0)])


# ---- what is kept ----


@pytest.fixture
def left(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "wrong"))
    return tmp_path / "wrong"


def fail(outputs, args):
    with pytest.raises(AssertionError) as failure:
        wrong_results.fail("op", "cuda", NOBODYS, outputs, args)
    return str(failure.value)


def test_wrong_results_and_small_inputs_are_kept(left):
    args = make_sample(np.random.default_rng(0), V=67, levels=0)
    got, exact = drawn_result((3, 4))
    got[1, 2] = 9.0
    told = fail([output(got, exact)], args | dict(large=np.zeros(1 << 20)))
    (path,) = left.iterdir()
    assert told.splitlines()[-1] == f"kept: {path}"
    assert path.name.startswith("op-cuda-seed-7-T-3")
    with np.load(path) as file:
        np.testing.assert_array_equal(file["got.y"], got)
        np.testing.assert_array_equal(file["exact.y"], exact)
        np.testing.assert_array_equal(file["float32.y"], exact.astype(np.float32))
        np.testing.assert_array_equal(file["in.logits"], args["logits"])
        assert file["in.draws"].shape == (len(args["draws"]), 6)
        assert file["in.V"] == 67 and "in.large" not in file
        about = json.loads(str(file["about"]))
    assert about["op"] == "op" and about["seed"] == "7" and about["sizes"] == {"T": "3"}
    assert "test_wrong_results.py::test_wrong_results_and" in about["test"]
    assert about["parts"]["y"] == {"shape": [3, 4], "first": [0, 0]}


@pytest.mark.parametrize("shape", ((5000, 300), (3, 900_000), (40, 50, 600)))
def test_the_wrong_part_of_a_large_result_is_kept(left, shape):
    got, exact = drawn_result(shape)
    rows = np.prod(shape[:-1])
    at = rows - 1, shape[-1] - 3
    got.reshape(rows, -1)[at] = np.nan
    fail([output(got, exact), output(got, exact, name="z")], {})
    (path,) = left.iterdir()
    assert path.stat().st_size <= wrong_results.KEPT_BYTES
    with np.load(path) as file:
        row, column = json.loads(str(file["about"]))["parts"]["z"]["first"]
        assert row % wrong_results.ALIGN == column % wrong_results.ALIGN == 0
        assert np.isnan(file["got.z"][at[0] - row, at[1] - column])
        assert file["exact.z"].nbytes > wrong_results.KEPT_BYTES // 16 or row + 64 >= rows
        np.testing.assert_array_equal(
            file["exact.z"][at[0] - row], exact.reshape(rows, -1)[at[0], column:]
        )


def test_no_op_fills_the_folder(left):
    got, exact = drawn_result((3, 4))
    for n in range(wrong_results.KEPT_FILES + 2):
        with pytest.raises(AssertionError):
            wrong_results.fail("op", "cuda", Case(str(n), {}), [output(got + 1, exact)], {})
    assert len(list(left.iterdir())) == wrong_results.KEPT_FILES


def test_without_a_folder_nothing_is_kept(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    got, exact = drawn_result((3, 4))
    assert "kept" not in fail([output(got + 1, exact)], {})
