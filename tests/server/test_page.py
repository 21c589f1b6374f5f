"""The page at / in a real browser (Chromium, headless): what a user of it sees and does.

A first server has trained and ended; the second, on the same folder, shows what is left of its runs
and makes one of its own. test_page_data.py asks for the same without a browser.
"""

import importlib
import math
import re
import tarfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import tinker
from support import page_runs
from support.foreign_page import BROWSER, REASON
from support.page_runs import LONG, LONG_STEPS, MARKUP, Runs
from tinsmith.chat.text import load_tokenizer
from tinsmith.demo.demo import MODEL
from tinsmith.engine.call_log import Call, Now
from tinsmith.engine.replica import ReplicaRow
from tinsmith.engine.worker import Worker
from tinsmith.server.backend import Backend
from tinsmith.server.dashboard import page as page_routes
from tinsmith.server.service.config import ServerConfig

if BROWSER is None:
    pytest.skip(REASON, allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install 'tinsmith[test]'"
)
Page, expect = playwright.Page, playwright.expect
PATIENCE = 60_000  # milliseconds: for a machine that is busy with other tests
expect.set_options(timeout=PATIENCE)
bench = importlib.import_module("page")  # benchmarks/page.py
KEY = "tml-the-right-one"
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 800}
TABS = ("curves", "samples", "checkpoints", "settings")


def start(folder: Path, **settings: Any) -> Backend:
    return Backend(
        ServerConfig({str(MODEL): MODEL}, checkpoints=folder, device="cpu", threads=1, **settings)
    )


@dataclass
class Site:
    """The server, what was done on it, and a run of its own that goes on."""

    url: str
    backend: Backend
    before: Runs
    client: tinker.TrainingClient

    def run(self, run: str, tab: str = "curves") -> str:
        return f"{self.url}/#/run/{run.replace(':', '%3A')}?tab={tab}"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("page")
    with start(folder) as backend, backend.service_client() as service:
        before = page_runs.work(backend, service)
        page_runs.many(backend)
    with start(folder, seed=3) as backend, backend.service_client() as service:
        make = service.create_lora_training_client
        client = make(str(MODEL), rank=4, seed=4, user_metadata={"name": "goes on"}).result()
        page_runs.step(client)
        httpx.get(f"{backend.url}/api/v1/training_runs/{quote('<img src=x>')}")
        yield Site(backend.url, backend, before, client)


@pytest.fixture(scope="module")
def browser(site: Site) -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str, **settings: Any) -> Iterator[Any]:
    """A page in a profile of its own, which may say nothing on its console."""
    settings = {"viewport": WIDE, "color_scheme": "light", "locale": "en-GB", **settings}
    context = browser.new_context(**settings)
    context.set_default_timeout(PATIENCE)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(url)
    page.set_default_timeout(PATIENCE)
    yield page
    context.close()
    refused = re.compile(r"the server responded with a status of 40[01]")
    assert [text for text in said if not refused.search(text)] == []


@pytest.fixture(scope="module")
def window(browser: Any, site: Site) -> Iterator[Any]:
    """One page for most tests."""
    with opened(browser, site.url) as page:
        yield page


@pytest.fixture
def page(window: Any) -> Any:
    """The same, as large and as light as at first."""
    window.set_viewport_size(WIDE)
    window.mouse.move(0, 0)
    return window


def chart(page: Any, title: str) -> Any:
    return page.locator(f'[data-chart="{title}"]')


def colour(token: Any) -> float:
    """How strongly a token is coloured, in [0, 1]."""
    text = token.evaluate("one => getComputedStyle(one).backgroundColor")
    found = re.fullmatch(r"rgba?\(\d+, \d+, \d+(?:, ([\d.]+))?\)", text)
    assert found, text
    return 1.0 if found[1] is None else float(found[1])


def until(page: Any, expression: str) -> None:
    """Waits until an expression is true. (Playwright's own way is an eval, which the policy
    forbids.)"""
    while not page.evaluate(expression):
        page.wait_for_timeout(20)


def box_of(shown: Any) -> dict[str, float]:
    """Where it is. There is none while the page replaces it by a newer one."""
    while (box := shown.bounding_box()) is None:
        shown.page.wait_for_timeout(20)
    return box


# ---- the runs ----


def test_the_runs_are_listed_and_can_be_searched(page: Any, site: Site) -> None:
    page.goto(f"{site.url}/#/")
    rows = page.locator("#runs li")
    expect(rows).to_have_count(5)
    expect(rows.first).to_contain_text("goes on")
    expect(page.locator(".runs .dot.ended")).to_have_count(4)
    expect(page.locator("#pulse")).to_have_text("live")
    page.fill("#search", "elsewhere")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text(f"step {LONG_STEPS - 1}")
    page.fill("#search", "no such run")
    expect(page.locator("#none")).to_have_text("No run fits the search.")
    page.fill("#search", "")
    expect(rows).to_have_count(5)


def test_a_run_moves_on_while_it_is_looked_at(page: Any, site: Site) -> None:
    page.goto(site.run(site.client.model_id))
    expect(page.locator("h1")).to_have_text("goes on")
    tile = page.locator(".tile", has_text="Steps").locator(".value")
    before = int(tile.inner_text())
    with ThreadPoolExecutor(1) as pool:  # here Playwright's event loop is under way
        last = pool.submit(page_runs.step, site.client).result()
    expect(tile).to_have_text(str(before + 1))
    norm = page.locator(".tile", has_text="Gradient norm").locator(".value")
    assert float(norm.inner_text()) == pytest.approx(last["grad_norm"], rel=5e-3)
    expect(page.locator("#status")).to_have_text("live")
    expect(chart(page, "Gradient norm").locator("output")).to_have_text(re.compile(r"^[\d.]+$"))


def test_every_figure_of_a_step_is_a_curve(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    titles = {
        "Loss per token", "Seconds of a step", "loss:sum", "Trained tokens a second",
        "Sampled tokens a second", "KL sampler–trainer", "KL sampler–trainer, second order",
        "Sampler entropy", "Gradient norm", "Weight norm", "Learning rate", "Tokens in a step",
    }  # fmt: skip
    expect(chart(page, "Tokens in a step")).to_be_visible()
    found = page.locator("[data-chart]").evaluate_all("all => all.map(one => one.dataset.chart)")
    assert titles <= set(found)
    expect(page.locator("[data-chart] .js-plotly-plot")).to_have_count(len(found))
    last = site.before.last
    for title, value in (("Gradient norm", last["grad_norm"]), ("Learning rate", 2e-3)):
        shown = chart(page, title).locator("output").inner_text()
        assert float(shown) == pytest.approx(value, rel=1e-3)


def test_one_cursor_is_in_all_charts(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    plot = chart(page, "Gradient norm").locator(".plot")
    box = box_of(plot)
    plot.hover(position={"x": 54, "y": box["height"] / 2})
    for title in ("Gradient norm", "Weight norm", "Seconds of a step"):
        expect(chart(page, title).locator("output .step")).to_have_text("step 0")
        expect(chart(page, title).locator(".cursor")).to_be_visible()
    plot.hover(position={"x": box["width"] - 14, "y": box["height"] / 2})
    expect(chart(page, "Weight norm").locator("output .step")).to_have_text("step 3")
    plot.focus()
    page.keyboard.press("ArrowLeft")
    expect(chart(page, "Weight norm").locator("output .step")).to_have_text("step 2")
    page.mouse.move(0, 0)


def test_a_steps_seconds_are_split(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    legend = chart(page, "Seconds of a step").locator(".legend")
    for part in ("forward and backward", "optimizer", "sampling", "saving", "waiting", "client"):
        expect(legend).to_contain_text(part)
    (rows, _) = site.backend.history.steps(site.before.taught)
    split = rows[-1]["split"]
    output = chart(page, "Seconds of a step").locator("output")
    shown = [float(text) for text in output.locator("span").all_inner_texts()]
    assert sum(shown) == pytest.approx(sum(split.values()), rel=0.02)
    assert split["sampling"] > 0 and len(shown) >= 4


def test_runs_are_compared(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    page.locator("#runs li", has_text="goes on").get_by_role("checkbox").check()
    expect(page.locator(".legend").first).to_contain_text("goes on")
    expect(chart(page, "Weight norm").locator("output .swatch")).to_have_count(2)
    page.keyboard.press("Escape")
    expect(chart(page, "Weight norm").locator("output .swatch")).to_have_count(0)


def test_smoothing_and_a_log_scale(page: Any, site: Site) -> None:
    page.goto(site.run(LONG))
    traces = "document.querySelector('[data-chart=\"Loss per token\"] .face')"
    until(page, f"{traces}?.data?.length === 1")
    page.locator("#smoothing").fill("0.9")
    until(page, f"{traces}.data.length === 2")
    page.locator("#log").check()
    until(page, f"{traces}._fullLayout.yaxis.type === 'log'")
    page.locator("#log").uncheck()
    page.locator("#smoothing").fill("0")
    until(page, f"{traces}.data.length === 1")


def test_a_long_run_shows_the_steps_that_were_kept(page: Any, site: Site) -> None:
    page.goto(site.run(LONG))
    face = "document.querySelector('[data-chart=\"Loss per token\"] .face')"
    until(page, f"{face}?.data?.[0].x.length === {LONG_STEPS // 2}")
    page.goto(site.run(LONG, "settings"))
    expect(page.locator("dl.facts-list").first).to_contain_text("one in 2")


def test_a_run_without_a_step_says_so(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.empty))
    expect(page.locator(".empty")).to_contain_text("No step yet")
    page.keyboard.press("2")
    expect(page.locator(".empty")).to_contain_text("Nothing sampled or trained yet")
    page.keyboard.press("3")
    expect(page.locator(".empty")).to_contain_text("No checkpoints")


def test_a_failure_is_told_with_its_sentence(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    expect(page.locator(".note")).to_contain_text("unknown loss 'no_such_loss'")
    expect(page.locator("#status")).to_have_text("ended")
    expect(page.locator(".doing")).to_contain_text("This run has ended. Its history stays.")


# ---- the client's own numbers ----


def test_the_reward_comes_first_and_groups_open(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    first = page.locator(".tile").first
    expect(first).to_contain_text("Reward")
    expect(first.locator(".value")).to_have_text("0.75")
    expect(page.locator("[data-chart]").first).to_have_attribute("data-chart", "reward")
    expect(chart(page, "reward").locator("output")).to_have_text("0.75")
    row = page.locator("#runs li", has=page.locator(f'[title^="{site.before.taught}"]'))
    expect(row).to_contain_text("reward 0.75")
    expect(chart(page, "env/right")).to_be_visible()  # one of few
    expect(chart(page, "time/part_0")).to_have_count(0)
    group = page.locator('[data-group="time"]')
    expect(group).to_have_text("time · 9")
    group.click()
    expect(group).to_have_attribute("aria-expanded", "true")
    expect(chart(page, "time/part_8")).to_be_visible()
    group.click()
    expect(chart(page, "time/part_8")).to_have_count(0)


def test_numbers_come_while_they_are_looked_at(page: Any, site: Site) -> None:
    page.goto(site.run(site.client.model_id))
    before = page.locator("[data-chart]").first
    expect(before).to_have_attribute("data-chart", "Loss per token")
    body = {"run": site.client.model_id, "metrics": {"mean_reward": 0.25}}
    headers = {"X-API-Key": "tml-local"}
    httpx.post(f"{site.url}/api/v1/log", json=body, headers=headers).raise_for_status()
    expect(before).to_have_attribute("data-chart", "mean_reward")
    expect(page.locator(".tile").first).to_contain_text("0.25")


def test_a_runs_warning_is_shown(page: Any, site: Site) -> None:
    page.goto(site.run(LONG))
    expect(page.locator(".warning")).to_have_text("weights grew by a factor of 2000")


# ---- what a run is called, and what it does ----


def test_a_run_without_a_name_is_called_by_its_model_and_time(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    called = re.compile(r"^model r8, [A-Z][a-z]{2} \d{1,2} \d\d:\d\d$")
    expect(page.locator("h1")).to_have_text(called)
    told = page.locator(".facts")
    expect(told).to_contain_text("importance_sampling")
    expect(told).to_contain_text(re.compile(r"begun \d{4}-\d\d-\d\d \d\d:\d\d:\d\d"))
    row = page.locator("#runs li", has_text="model r8")
    expect(row).to_contain_text("importance_sampling")


def test_the_box_says_for_whom_the_engine_works(
    page: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = site.client.model_id
    call = Call("forward_backward", site.before.taught, tokens=9, began=1.0, done=1, count=3)
    now = Now([call], {run: 2}, {str(MODEL): 1})
    monkeypatch.setattr(type(site.backend.worker), "now", property(lambda worker: now))
    page.goto(site.run(run))
    box = page.locator(".doing")
    expect(page.locator("#status")).to_have_text("waiting")
    expect(box).to_contain_text(re.compile("The engine works for model r8, "))
    expect(box).to_contain_text("2 requests of this run in line")
    expect(box).to_contain_text("1 sample under way on model")
    page.goto(f"{site.url}/#/machine")
    panel = page.locator(".panel", has_text="Who waits")
    expect(panel).to_contain_text("1 of 3 micro-batches")
    expect(panel).to_contain_text(f"goes on session {run[:8]}")


# ---- its samples, checkpoints and settings ----


def test_samples_are_coloured_and_the_teacher_stands_beside(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught, "samples"))
    card = page.locator('.sample[data-kind="sample"]', has=page.locator(".pair"))
    expect(card).to_have_count(1)
    expect(card.locator(".before")).to_contain_text("How do I get from Porto to Lima?")
    student, teacher = card.locator(".text").all()
    sample, scores = site.before.samples[0], site.before.teacher
    text = load_tokenizer(MODEL).decode(list(sample.tokens), skip_special_tokens=False)
    for side, logprobs in ((student, sample.logprobs), (teacher, scores)):
        tokens = side.locator(".tok")
        assert "".join(tokens.all_text_contents()) == text
        likely, surprising = (pick(range(len(logprobs)), key=logprobs.__getitem__)
                              for pick in (max, min))  # fmt: skip
        assert colour(tokens.nth(likely)) < 0.05 < colour(tokens.nth(surprising))
    place = min(range(len(scores)), key=scores.__getitem__)
    teacher.locator(".tok").nth(place).hover()
    tip = page.locator("#tip")
    for who, logprob in (("student", sample.logprobs[place]), ("teacher", scores[place])):
        row = tip.locator("tr", has_text=who)
        assert float(row.locator("td").nth(1).inner_text()) == pytest.approx(
            logprob, rel=5e-4, abs=1e-3
        )
    page.get_by_label("Colour by").select_option("difference")
    expect(page.locator(".pair")).to_have_count(0)
    page.get_by_label("Which").select_option("datum")
    expect(page.locator('.sample[data-kind="sample"]')).to_have_count(0)
    expect(page.locator('.sample[data-kind="datum"]').first).to_contain_text("importance_sampling")


def test_checkpoints_have_sizes_and_a_time_to_live(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught, "checkpoints"))
    rows = page.locator("table.list tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.filter(has_text="kept")).to_contain_text("no ttl")
    gone = rows.filter(has_text="gone-soon")
    expect(gone).not_to_contain_text("no ttl")
    expect(gone).to_contain_text("only a mark")
    told = httpx.get(f"{site.url}/page/data/runs/{site.before.taught}/checkpoints").json()
    sizes = {row["path"].rpartition("/")[2]: row["bytes"] for row in told["checkpoints"]}
    assert f"{sizes['kept'] / 2**20:.2f} MiB" in rows.filter(has_text="kept").inner_text()
    gone.get_by_role("link", name="Chat").click()
    selects = page.get_by_label("Model", exact=True)
    expect(selects).to_have_count(2)
    expect(selects.nth(1)).to_have_value(re.compile("sampler_weights/gone-soon$"))


def test_a_checkpoint_is_copied_exported_fetched_and_deleted(page: Any, site: Site) -> None:
    with ThreadPoolExecutor(1) as pool:
        path = pool.submit(lambda: site.client.save_state("short").result().path).result()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto(site.run(site.client.model_id, "checkpoints"))
    row = page.locator("table.list tbody tr", has_text="short")
    box = box_of(row.locator(".path"))
    assert box["height"] < 30  # one line
    row.get_by_role("button", name="Copy path").click()
    expect(row.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == path
    with page.expect_download() as fetched:
        row.get_by_role("link", name="Download").click()
    assert fetched.value.suggested_filename == "short.tar"
    with tarfile.open(fetched.value.path()) as files:
        assert "adapter_model.safetensors" in files.getnames()
    row.get_by_role("button", name="Export").click()
    dialog = page.locator("dialog[open]")
    expect(dialog.locator("code")).to_contain_text(f"tinsmith export {MODEL} {path} merged")
    dialog.get_by_role("button", name="Close").click()
    row.get_by_role("button", name="Delete").click()
    expect(dialog).to_contain_text(path)
    dialog.get_by_role("button", name="Cancel").click()
    expect(row).to_be_visible()
    row.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    reply = httpx.get(f"{site.url}/page/data/runs/{site.client.model_id}/checkpoints")
    assert reply.json() == {"checkpoints": []}


def test_the_configuration_and_user_metadata_are_told(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught, "settings"))
    told = page.locator(".columns")
    for text in ("rank\n8", "beta2\n0.95", "learning_rate\n0.002", "recipe\nroutes",
                 "dataset\nsynthetic <b>", "importance_sampling"):  # fmt: skip
        expect(told).to_contain_text(text.replace("\n", ""))


# ---- the machine ----


def test_the_machine_shows_memory_and_what_was_refused(page: Any, site: Site) -> None:
    page.goto(f"{site.url}/#/machine")
    for use in ("weights", "adapters", "arenas"):
        expect(page.locator(f'[data-use="{use}"] b')).to_have_text(re.compile(r"^[\d.]+ [KMG]iB$"))
    expect(page.locator(".panel", has_text="Who waits")).to_contain_text("1 session, 1 run")
    refused = page.get_by_role("table", name="Refused requests").locator("tbody tr")
    expect(refused.first).to_contain_text("404")
    expect(refused.first).to_contain_text("there is no training run '<img src=x>'")
    expect(page.get_by_role("table", name="Models")).to_contain_text("2,048")


def test_the_machine_shows_a_row_for_each_replica(
    page: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.goto(f"{site.url}/#/machine")
    expect(page.get_by_role("table", name="Models")).to_be_visible()
    expect(page.get_by_role("table", name="Replicas")).to_have_count(0)
    own = ReplicaRow("replica 1", "cuda", "owner", 7, 12, 0, 0, 0, None)
    other = ReplicaRow("replica 2", "cuda:1", "lost", 0, 1_234, 2 << 20, 0, 0, 0)
    monkeypatch.setattr(Worker, "replicas", [own, other])
    rows = page.get_by_role("table", name="Replicas").locator("tbody tr")
    for row, texts in enumerate((("cuda", "owner", "7"), ("cuda:1", "lost", "1,234", "2.00 MiB"))):
        for text in texts:
            expect(rows.nth(row)).to_contain_text(text)


# ---- talking ----


def test_two_models_answer_side_by_side_with_the_chance_of_each_token(
    page: Any, site: Site
) -> None:
    page.goto(f"{site.url}/#/chat")
    if page.locator(".pane").count() < 2:
        page.get_by_role("button", name="Side by side").click()
    base, tuned = page.locator(".pane").all()
    base.get_by_label("Model", exact=True).select_option(str(MODEL))
    tuned.get_by_label("Model", exact=True).select_option(
        f"tinker://{site.before.taught}/weights/kept"
    )
    for name, value in (("temperature", 0), ("max_tokens", 12), ("seed", 1)):
        page.fill(f'[name="{name}"]', str(value))
    page.uncheck('[name="think"]')
    page.fill("#message", "How do I get from Porto to Lima?")
    page.keyboard.press("Enter")
    for pane in (base, tuned):
        expect(pane.locator(".turn.user")).to_have_text("How do I get from Porto to Lima?")
        expect(pane.locator(".turn.assistant .about")).to_contain_text("ended by")
    body = {
        "model": str(MODEL), "temperature": 0, "max_tokens": 12, "logprobs": True,
        "chat_template_kwargs": {"enable_thinking": False},
        "messages": [{"role": "user", "content": "How do I get from Porto to Lima?"}],
    }  # fmt: skip
    reply = httpx.post(f"{site.url}/v1/chat/completions", json=body).raise_for_status()
    (choice,) = reply.json()["choices"]
    expect(base.locator(".turn.assistant .text")).to_have_text(choice["message"]["content"])
    first = choice["logprobs"]["content"][0]
    base.locator(".tok").first.hover()
    tip = page.locator("#tip")
    expect(tip).to_contain_text(f"“{first['token']}”")
    shown = tip.locator("tr", has_text="chance").locator("td").first.inner_text()
    assert float(shown.removesuffix(" %")) == pytest.approx(100 * math.exp(first["logprob"]), 0.01)
    expect(tip.locator("table").nth(1).locator("tr")).to_have_count(6)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.locator(".pane").nth(1).get_by_label("Close this side").click()
    expect(page.locator(".pane")).to_have_count(1)


def test_an_option_that_is_refused_gets_its_sentence(page: Any, site: Site) -> None:
    page.goto(f"{site.url}/#/chat")
    page.fill('[name="top_p"]', "7")
    page.fill("#message", "Hello")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".about.bad").first).to_contain_text("top_p")
    page.fill('[name="top_p"]', "1")


# ---- what others have written ----


def test_markup_is_text(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.markup))
    expect(page.locator("h1")).to_have_text(MARKUP)
    expect(page.locator("#runs")).to_contain_text(MARKUP)
    for tab in TABS:
        page.goto(site.run(site.before.markup, tab))
        expect(page.locator(f'[data-tab="{tab}"]')).to_have_attribute("aria-selected", "true")
        if tab == "samples":
            expect(page.locator(".sample").first).to_contain_text(MARKUP)
        if tab == "settings":
            expect(page.locator(".columns")).to_contain_text(MARKUP + MARKUP)
    page.goto(f"{site.url}/#/machine")
    expect(page.get_by_role("table", name="Refused requests")).to_be_visible()
    assert page.title() == "tinsmith"
    assert page.locator("main script, main img, .runs script, .runs img").count() == 0


# ---- how it is used ----


def test_it_is_used_by_keys(page: Any, site: Site) -> None:
    page.goto(f"{site.url}/#/")
    expect(page.locator("h1")).to_have_text("goes on")
    page.keyboard.press("j")
    expect(page.locator("h1")).not_to_have_text("goes on")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("goes on")
    page.keyboard.press("4")
    tabs = page.get_by_role("tab")
    expect(tabs.nth(3)).to_have_attribute("aria-selected", "true")
    tabs.nth(3).focus()
    page.keyboard.press("ArrowRight")
    expect(tabs.first).to_be_focused()
    expect(tabs.first).to_have_attribute("aria-selected", "true")
    page.keyboard.press("/")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("m")  # in a field a key is a letter
    page.keyboard.press("Escape")
    page.fill("#search", "")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.locator("#keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#keys")).to_be_hidden()
    page.keyboard.press("m")
    expect(page.locator("h1")).to_have_text("Machine")
    page.keyboard.press("c")
    expect(page.locator("#message")).to_be_visible()


def test_it_is_dark_or_light_as_one_likes(page: Any, site: Site) -> None:
    page.goto(site.run(site.before.taught))
    ground = "getComputedStyle(document.body).backgroundColor"
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    page.emulate_media(color_scheme="dark")
    until(page, f"{ground} !== '{light}'")
    page.get_by_label("Dark or light").click()
    until(page, f"{ground} === '{light}'")
    page.emulate_media(color_scheme="light")
    page.get_by_label("Dark or light").click()
    assert page.evaluate(ground) != light  # a choice outlives the system's
    page.get_by_label("Dark or light").click()


def test_the_phones_table_says_why(page: Any, site: Site) -> None:
    page.set_viewport_size(NARROW)
    page.goto(f"{site.url}/#/machine")
    table = page.get_by_role("table", name="Refused requests")
    why = table.locator('td[data-title="Why"]').first
    expect(why).to_be_visible()
    box = box_of(why)
    assert box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"] and box["width"] > 300
    page.goto(site.run(site.before.taught))
    for tab in page.get_by_role("tab").all():
        box = box_of(tab)
        assert box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"]


@pytest.mark.parametrize("width", (390, 768, 1280, 1600))
def test_no_label_is_cut_at_any_width(page: Any, site: Site, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(site.run(site.before.taught))
    expect(page.locator(".tile")).to_have_count(9)
    expect(chart(page, "reward")).to_be_visible()
    cut = """all => all.filter(one => one.scrollWidth > one.clientWidth + 1)
        .map(one => one.textContent)"""
    labels = ".tile .label, .tile .value, .runs .name, .runs .sub, .tabs button, h1, .facts"
    assert page.locator(labels).evaluate_all(cut) == []


def test_only_who_can_think_is_asked_to(
    browser: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    for can in (True, False):
        monkeypatch.setattr(page_routes, "thinks", lambda folder, can=can: can)
        with opened(browser, f"{site.url}/#/chat") as page:
            expect(page.locator("select option").first).to_be_attached()
            expect(page.locator('[name="think"]')).to_be_visible(visible=can)
            new, two = (box_of(page.get_by_role("button", name=name))
                        for name in ("New chat", "Side by side"))  # fmt: skip
            assert abs(new["y"] - two["y"]) < 2


@pytest.mark.parametrize("view", (*TABS, "chat", "machine"))
def test_nothing_is_cut_off_on_a_narrow_screen(page: Any, site: Site, view: str) -> None:
    page.set_viewport_size(NARROW)
    page.goto(site.run(site.before.taught, view) if view in TABS else f"{site.url}/#/{view}")
    ready = {"chat": "#message", "machine": ".bar"}.get(
        view, f"[aria-selected=true][data-tab={view}]"
    )
    expect(page.locator(ready).first).to_be_visible()
    expect(page.locator("#theme")).to_be_in_viewport()
    until(page, "document.documentElement.scrollWidth <= innerWidth")
    wide = """all => all.filter(one => {
        const {left, right} = one.getBoundingClientRect();
        const out = right > left && (right > innerWidth + 1 || left < -1);
        return out && !one.closest('.scroll, .tabs');
    }).map(one => one.outerHTML.slice(0, 120))"""
    assert page.locator("main *:not(svg *), .top *").evaluate_all(wide) == []


def test_without_plotly_there_are_plain_lines(
    browser: Any, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_routes, "plotly", lambda: None)
    with opened(browser, site.run(site.before.taught)) as page:
        path = chart(page, "Weight norm").locator("svg.plain path")
        expect(path).to_have_attribute("d", re.compile(r"^M[\d.]+ [\d.]+(L[\d.]+ [\d.]+){3}$"))
        bars = chart(page, "Seconds of a step").locator("svg.plain rect")
        expect(bars.first).to_be_visible()
        chart(page, "Weight norm").locator(".plot").hover(position={"x": 54, "y": 80})
        expect(chart(page, "Loss per token").locator("output .step")).to_have_text("step 0")
        assert page.locator(".js-plotly-plot").count() == 0


def test_a_server_with_a_key_asks_for_it(browser: Any, tmp_path: Path) -> None:
    with start(tmp_path, api_key=KEY) as backend, opened(browser, backend.url) as page:
        dialog = page.locator("#ask")
        expect(dialog).to_be_visible()
        page.fill("#ask-key", "tml-another-one")
        page.keyboard.press("Enter")
        expect(page.locator("#ask-wrong")).to_be_visible()
        page.fill("#ask-key", KEY)
        page.get_by_role("button", name="Continue").click()
        expect(page.locator("#pulse")).to_have_text("live")
        expect(page.locator("main")).to_contain_text("No runs yet")
        page.reload()
        expect(page.locator("#pulse")).to_have_text("live")
        expect(dialog).to_be_hidden()


@pytest.mark.parametrize("view", bench.VIEWS)
def test_the_benchmark_asks_what_the_page_asks(browser: Any, site: Site, view: str) -> None:
    run = site.client.model_id
    visitor, mine, theirs = bench.Visitor(site.url, run), [], []
    visitor.client.event_hooks["request"].append(lambda request: mine.append(str(request.url)))
    for what in bench.asked(view):
        visitor.ask(what)
    with opened(browser, "about:blank") as page:
        page.on("request", lambda request: theirs.append(request.url))
        page.goto(f"{site.url}/#/machine" if view == "machine" else site.run(run, view))
        while sum("/runs?after=" in url for url in theirs) < 2:
            page.wait_for_timeout(100)
    data = {url.partition("?")[0] for url in theirs if "/page/data/" in url}
    assert {url.partition("?")[0] for url in mine} == data - {f"{site.url}/page/data/hello"}


@contextmanager
def proxied(url: str, prefix: str) -> Iterator[str]:
    """A proxy that serves another server under a prefix; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith(prefix):
                self.send_error(404)
                return
            reply = client.get("/" + self.path.removeprefix(prefix))
            self.send_response(reply.status_code)
            for name in ("content-type", "content-security-policy"):
                if name in reply.headers:
                    self.send_header(name, reply.headers[name])
            self.send_header("content-length", str(len(reply.content)))
            self.end_headers()
            self.wfile.write(reply.content)

        def log_message(self, *arguments: Any) -> None:
            pass

    client = httpx.Client(base_url=url)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}{prefix}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        client.close()


def test_it_works_behind_a_path(browser: Any, site: Site) -> None:
    with proxied(site.url, "/lab/tinsmith/") as url, opened(browser, url) as page:
        expect(page.locator("#runs li")).to_have_count(5)
        expect(page.locator("h1")).to_have_text("goes on")
        expect(chart(page, "Weight norm").locator(".js-plotly-plot")).to_be_visible()
        page.keyboard.press("m")
        expect(page.locator("h1")).to_have_text("Machine")
        assert page.locator(".mark img").evaluate("one => one.naturalWidth") > 0
