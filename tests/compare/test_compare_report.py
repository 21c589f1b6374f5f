"""The report of `tinsmith compare`, against figures made by hand and by other means."""

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinsmith.cli import argument_types
from tinsmith.compare import picture, plan, report
from tinsmith.compare.plan import Plan


def result(method: str, rate: float | None, seed: int | None, *figures: float) -> dict[str, Any]:
    learned, kept, learned_logprob, kept_logprob = figures
    return {
        "method": method, "learning_rate": rate, "seed": seed, "seconds": 10.0 + (seed or 0),
        "sampler_path": None if seed is None else f"tinker://{method}/{seed}",
        "learned": {"exact": learned, "logprob": learned_logprob},
        "kept": {"exact": kept, "logprob": kept_logprob},
    }  # fmt: skip


RESULTS = {
    "base": result("base", None, None, 0.1, 1.0, -2.0, -0.5),
    "opsd-lr0.001-seed0": result("opsd", 1e-3, 0, 0.8, 0.9, -0.25, -0.75),
    "opsd-lr0.001-seed1": result("opsd", 1e-3, 1, 1.0, 0.9, -0.75, -0.25),
    "sft-lr0.01-seed0": result("sft", 1e-2, 0, 0.7, 0.2, -0.1, -3.0),
    "sft-lr0.001-seed0": result("sft", 1e-3, 0, 0.8, 0.5, -0.1, -1.0),
    "sft-lr0.001-seed1": result("sft", 1e-3, 1, 0.9, 0.5, -0.2, -1.0),
    "sft-lr0.001-seed2": result("sft", 1e-3, 2, 1.0, 0.5, -0.3, -1.0),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in RESULTS.items():
        (tmp_path / "runs" / name).mkdir(parents=True)
        plan.write_json(tmp_path / "runs" / name / "result.json", content)
    return tmp_path


def test_students_t_by_integration() -> None:
    """The share of the t distribution between the two bounds is 0.95."""
    for degrees, bound in enumerate(report.T95, 1):
        x, step = np.linspace(-bound, bound, 400_001, retstep=True)
        density = (1 + x * x / degrees) ** (-(degrees + 1) / 2)
        scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2)
        share = float(np.sum(density) * step) * scale / math.sqrt(degrees * math.pi)
        assert share == pytest.approx(0.95, abs=1e-4), degrees
    assert len(report.T95) == argument_types.SEEDS_MAX - 1


def test_an_estimate_by_hand() -> None:
    """0.8, 0.9, 1.0: s = 0.1; 4.303 · 0.1 / √3 = 0.24843."""
    three = report.estimate([0.8, 0.9, 1.0])
    assert three.mean == pytest.approx(0.9) and three.half == pytest.approx(0.24843, abs=1e-5)
    two = report.estimate([0.8, 1.0])  # s = 0.141421; 12.706 · 0.141421 / √2 = 1.2706
    assert two.half == pytest.approx(1.2706)
    assert report.estimate([0.5]) == report.Estimate(0.5, None)
    assert report.estimate([0.5, 0.5]).half == 0


def test_the_table_by_hand(folder: Path) -> None:
    titles, *rows = report.table(report.groups(folder))
    assert titles == [
        "method", "learning rate", "seeds", "learned: exact", "learned: logprob", "kept: exact",
        "kept: logprob", "seconds a run",
    ]  # fmt: skip
    assert rows == [
        ["base model", "", "", "10.0 %", "-2", "100.0 %", "-0.5", "10"],
        ["SFT", "0.001", "3", "90.0 ± 24.8 %", "-0.2 ± 0.25", "50.0 ± 0.0 %", "-1 ± 0", "11"],
        ["SFT", "0.01", "1", "70.0 %", "-0.1", "20.0 %", "-3", "10"],
        ["OPSD", "0.001", "2", "90.0 ± 127.1 %", "-0.5 ± 3.2", "90.0 ± 0.0 %", "-0.5 ± 3.2", "10"],
    ]
    lines = report.markdown([titles, *rows]).splitlines()
    assert len({len(line) for line in lines}) == 1 and set(lines[1]) == {"|", "-"}


def test_the_csv_has_a_row_for_each_run(folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(report.csv_text(report.groups(folder)))))
    assert len(rows) == len(RESULTS)
    for row in rows:
        (expected,) = [
            one for one in RESULTS.values()
            if (one["method"], str(one["seed"] if one["seed"] is not None else ""))
            == (row["method"], row["seed"])
            and str(one["learning_rate"] or "") == row["learning_rate"]
        ]  # fmt: skip
        for side in ("learned", "kept"):
            for name in ("exact", "logprob"):
                assert float(row[f"{side}_{name}"]) == expected[side][name]
        assert row["sampler_path"] == (expected["sampler_path"] or "")


def test_a_scorers_figure_comes_first(folder: Path) -> None:
    for path in folder.glob("runs/*/result.json"):
        content = json.loads(path.read_text())
        for side in ("learned", "kept"):
            content[side]["score"] = 1.5
        plan.write_json(path, content)
    found = report.groups(folder)
    assert report.measures_of(found, "kept") == ["score", "exact", "logprob"]
    assert report.table(found)[2][3] == "1.5 ± 0"


def test_the_picture_shows_every_mean_interval_and_seed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown: list[Any] = []
    monkeypatch.setattr(plt, "close", shown.append)
    picture.draw(report.groups(folder), folder / "compare.png")
    monkeypatch.undo()
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = shown
    left, right = figure.axes
    for axes, kept in ((left, (50.0, 90.0)), (right, (-1.0, -0.5))):
        bars = [container for container in axes.containers if container.has_yerr]
        means = {tuple(round(float(v[0]), 6) for v in bar.lines[0].get_data()) for bar in bars}
        assert {(kept[0], 90.0), (kept[1], 90.0)} <= means and len(means) == 4
        seeds = np.concatenate([seen.get_offsets() for seen in axes.collections
                                if len(seen.get_offsets()) > 1])  # fmt: skip
        assert len(seeds) == 5 and {round(float(y), 6) for _, y in seeds} == {80.0, 90.0, 100.0}
    # SFT at 0.001: 24.843 points of learning, none of keeping
    caps = [line.get_ydata()[0] for bar in left.containers for line in bar.lines[1]]
    assert any(cap == pytest.approx(90 + 24.843, abs=1e-2) for cap in caps)
    plt.close(figure)


def test_runs_that_are_not_whole_are_no_results(folder: Path) -> None:
    part = folder / "runs" / "opsd-lr0.001-seed2~part"
    part.mkdir()
    (part / "result.json").write_text("{}")
    (folder / "runs" / "opsd-lr0.001-seed3").mkdir()
    assert plan.finished(folder).keys() == RESULTS.keys()


def test_settings_of_methods_that_are_not_asked_for_again_are_kept(tmp_path: Path) -> None:
    made = Plan(
        model="m", data="d", test=None, retain="r", hold_out=4, renderer="qwen3", scorer=None,
        steps=1, batch=2, rank=2, max_tokens=8, context=9, methods={"sdft": {"topk": 20}},
        digests={}, wanted=["sdft"], learning_rates=[1e-3], seeds=1,
    )  # fmt: skip
    plan.begin(tmp_path, made)
    with plan.making(tmp_path, plan.PlannedRun("sdft", 1e-3, 0)) as place:
        measures = {"exact": 1.0, "logprob": -0.1}
        result = {"method": "sdft", "seconds": 1.0, "learned": measures, "kept": measures}
        plan.write_json(place / "result.json", result)
    from dataclasses import replace

    plan.begin(tmp_path, replace(made, methods={"sft": {}}, wanted=["sft"]))
    assert plan.read_plan(tmp_path).methods == {"sdft": {"topk": 20}, "sft": {}}
    with pytest.raises(ValueError, match=r"sdft\.topk was 20, and is 9"):
        plan.begin(tmp_path, replace(made, methods={"sdft": {"topk": 9}}))
    plan.begin(tmp_path, replace(made, methods={"sft": {}, "opsd": {"beta": 1.0}}))
    plan.begin(tmp_path, replace(made, methods={"opsd": {"beta": 0.0}}))  # which has no runs
    (tmp_path / "settings.json").write_text('{"model": 1}')
    with pytest.raises(ValueError, match=r"settings.json is not tinsmith's"):
        plan.read_plan(tmp_path)
