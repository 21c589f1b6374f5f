"""What a notebook shows of a result: curves where it is one, shaded texts, and bars of progress."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from html import escape, unescape
from typing import Any

import numpy as np
import pytest
import tinsmith
import torch
from support.api_cases import PROMPT, TOKENS, state
from tinsmith.api import plots

ROW = TOKENS[1]


def lines(shown: str | None) -> list[int]:
    """How many points each curve of a plot has, of those that are longer than a tick."""
    assert shown is not None
    root = ElementTree.fromstring(shown[shown.index("<svg") :])
    space = "{http://www.w3.org/2000/svg}"
    groups = [g for g in root.iter(f"{space}g") if g.get("id", "").startswith("line2d")]
    paths = [path.get("d", "") for g in groups for path in g.findall(f"{space}path")]
    return [path.count("L") + path.count("M") for path in paths if path.count("L") > 1]


def test_curves_have_a_line_for_each_sequence(model) -> None:
    adapter = model.lora(rank=2, seed=1)
    one = adapter.forward_backward(ROW[:12], torch.from_numpy(ROW[1:13]))
    assert lines(one._repr_html_()) == [12]
    several = adapter.forward_backward([ROW[:9], ROW[:6]], [ROW[1:10], ROW[1:7]])
    assert lines(several._repr_html_()) == [9, 6]
    many = adapter.forward_backward([ROW[:5]] * 30, [ROW[1:6]] * 30)
    assert lines(many._repr_html_()) == [5] * plots.CURVES_MAX
    divergence = adapter.generalized_jsd(ROW[:7], ROW[1:8], np.ones(7), ROW[:8])
    assert lines(divergence._repr_html_()) == [7]
    soft = adapter.forward_backward(ROW[:9], np.ones((9, 3), np.int32))
    assert soft._repr_html_() is None
    assert adapter.forward_backward(ROW[:1], ROW[1:2])._repr_html_() is None


def test_a_history_is_the_steps_that_were_taken(model) -> None:
    adapter = model.lora(rank=2, seed=1)
    assert repr(adapter.history) == "<tinsmith.History: no steps>"
    steps = []
    for _ in range(6):
        adapter.forward_backward(ROW[:-1], ROW[1:])
        steps.append(adapter.optim_step(1e-2))
    with pytest.raises(FloatingPointError):
        adapter.forward_backward(ROW[:-1], ROW[1:])
        adapter.optim_step(1e38)
    assert list(adapter.history) == steps
    assert list(adapter.history[2:4]) == steps[2:4]
    assert steps[0].loss > steps[-1].loss
    assert lines(adapter.history._repr_html_()) == [6, 6]
    assert f"6 steps, loss from {steps[0].loss:.6g} to {steps[-1].loss:.6g}" in repr(
        adapter.history
    )


def test_without_matplotlib_a_result_is_its_repr(model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert model.lora(rank=2).forward_backward(ROW, ROW)._repr_html_() is None


def test_a_samples_tokens_are_shaded_and_escaped(model) -> None:
    [drawn] = model.sampler().sample(PROMPT, max_tokens=40, seed=3, stop=[])
    shown = drawn._repr_html_()
    spans = re.findall(r'<span title="([^"]*)" style="[^"<>]*">([^<]*)</span>', shown)
    assert [unescape(text) for _, text in spans] == model.tokenizer.pieces(drawn.tokens)
    assert [number for number, _ in spans] == [f"{x:.2f}" for x in drawn.logprobs.tolist()]
    assert shown.startswith(f"<pre>{escape(repr(drawn))}</pre>")
    hostile = plots.shaded("<b>", ["<script>"], [0.0])
    assert "<script>" not in hostile and "<b>" not in hostile
    assert "rgba(214,96,77,0.00)" in hostile
    assert "rgba(214,96,77,0.75)" in plots.shaded("", ["a"], [-99.0])
    assert tinsmith.SampledSequence([1], [0.0], "length")._repr_html_() is None


# ---- progress ----


@pytest.fixture
def long(model) -> Any:
    """An adapter whose micro-batches are small, so that a call has several."""
    from tinsmith import _core
    from tinsmith.api.adapter import Adapter

    made = model.lora(rank=2, seed=1)
    core = _core.Adapter(model.core, rank=2, seed=1, step_tokens=64)
    return Adapter(model.engine, core, made._meta)


def test_training_calls_report_their_micro_batches(long) -> None:
    rows = [ROW[:-1]] * 6, [ROW[1:]] * 6
    plain = long.forward_backward(*rows)
    wanted = state(long)
    calls = {
        "forward_backward": lambda p: long.forward_backward(*rows, progress=p),
        "generalized_jsd": lambda p: long.generalized_jsd(
            *rows, [np.ones(39)] * 6, [ROW] * 6, progress=p
        ),
        "forward": lambda p: long.forward(*rows, progress=p),
        "backward": lambda p: long.backward([np.ones(39)] * 6, progress=p),
    }
    for name, call in calls.items():
        seen: list[tuple[int, int]] = []
        long.zero_grad()
        out = call(lambda *now, seen=seen: seen.append(now))
        done = [now for now, _ in seen]
        assert done == sorted(done), name
        assert done[-1] == seen[-1][1] > 2, name
        if name == "forward_backward":
            assert out.loss == plain.loss
            assert state(long) == wanted  # no bit depends on it


def test_scores_report_their_sequences_and_bars_are_drawn(model, long, capfd) -> None:
    seen: list[tuple[int, int]] = []
    model.logprobs([ROW] * 5, progress=lambda *now: seen.append(now))
    assert seen[-1] == (5, 5)
    model.topk_logprobs([ROW] * 4, 2, progress=True)
    long.forward_backward([ROW] * 6, [ROW] * 6, progress=True)
    shown = capfd.readouterr().err
    assert "scoring: 100%" in shown and "4/4" in shown
    assert "forward_backward: 100%" in shown


def test_an_error_in_the_callers_function_ends_the_call_and_leaves_the_adapter(long) -> None:
    before = state(long)

    def refuse(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        long.forward_backward([ROW] * 400, [ROW] * 400, progress=refuse)
    assert state(long) == before
