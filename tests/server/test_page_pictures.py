"""Pictures in the page's chat, in a real browser: chosen, dropped, shown, sent, and refused with a
sentence. The model sees, and answers as it does through OpenAI's route."""

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from support.chat_models import make_model
from support.foreign_page import BROWSER, REASON
from support.images import jpeg, png
from support.seeing_chat import chat_folder
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

if BROWSER is None:
    pytest.skip(REASON, allow_module_level=True)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="no playwright: pip install 'tinsmith[test]'"
)
expect = playwright.expect
PATIENCE = 60_000  # milliseconds: for a machine that is busy with other tests
expect.set_options(timeout=PATIENCE)
FILES = {"cat.png": png(1, (70, 100)), "dog.jpg": jpeg(2, (64, 65))}
SETTINGS = {"temperature": 0, "max_tokens": 6, "seed": 1}
# Drops a file on an element, as a browser does.
DROP = """(place, [name, data]) => {
    const bytes = Uint8Array.from(atob(data), one => one.charCodeAt(0));
    const dataTransfer = new DataTransfer();
    dataTransfer.items.add(new File([bytes], name));
    for (const kind of ['dragover', 'drop'])
        place.dispatchEvent(new DragEvent(kind, {dataTransfer, bubbles: true, cancelable: true}));
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    root = tmp_path_factory.mktemp("pictures")
    models = {"seeing": chat_folder(), "blind": make_model(root / "blind")}
    with Backend(
        ServerConfig(models, checkpoints=root / "saved", device="cpu", threads=1)
    ) as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        browser = started.chromium.launch(executable_path=BROWSER, args=arguments)
        yield browser
        browser.close()


@contextmanager
def chat(browser: Any, server: Backend, model: str = "seeing", **settings: Any) -> Iterator[Any]:
    """A chat with a model, whose page may tell its console of refusals alone."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, **settings)
    context.set_default_timeout(PATIENCE)
    page, said = context.new_page(), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{server.url}/#/chat")
    page.get_by_label("Model", exact=True).select_option(model)
    for name, value in SETTINGS.items():
        page.fill(f'[name="{name}"]', str(value))
    yield page
    context.close()
    assert [text for text in said if "with a status of 400" not in text] == []


def choose(page: Any, *names: str, **more: bytes) -> None:
    files = {**{name: FILES[name] for name in names}, **more}
    given = [{"name": name, "mimeType": "", "buffer": data} for name, data in files.items()]
    page.locator('input[type="file"]').set_input_files(given)


def thumbnails(page: Any) -> Any:
    return page.get_by_role("list", name="Pictures of the next message").get_by_role("img")


def part(name: str) -> dict[str, Any]:
    kind = "png" if name.endswith("png") else "jpeg"
    data = base64.b64encode(FILES[name]).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}


def answer(server: Backend, *messages: dict[str, Any]) -> str:
    body = {"model": "seeing", "messages": messages, **SETTINGS}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]


def test_pictures_are_shown_and_sent_with_the_message(browser: Any, server: Backend) -> None:
    with chat(browser, server) as page:
        choose(page, "cat.png")
        expect(page.get_by_role("status").filter(has_text="1 picture added")).to_be_visible()
        data = base64.b64encode(FILES["dog.jpg"]).decode()
        page.locator("#message").evaluate(DROP, ["dog.jpg", data])
        expect(thumbnails(page)).to_have_count(2)
        assert [one.get_attribute("alt") for one in thumbnails(page).all()] == list(FILES)
        assert thumbnails(page).first.evaluate("one => one.naturalWidth") == 100
        page.fill("#message", "What is it?")
        page.keyboard.press("Enter")
        expect(page.locator(".turn.user")).to_have_text("What is it?")
        seen = page.locator(".turn.user img")
        assert [one.get_attribute("alt") for one in seen.all()] == list(FILES)
        expect(thumbnails(page)).to_have_count(0)
        first = {"role": "user", "content": [*map(part, FILES), {"type": "text",
                 "text": "What is it?"}]}  # fmt: skip
        said = answer(server, first)
        expect(page.locator(".turn.assistant .about").first).to_contain_text("ended by")
        expect(page.locator(".turn.assistant .text").first).to_have_text(said)
        choose(page, "dog.jpg")  # and no text; the first message stays in the conversation
        expect(thumbnails(page)).to_have_count(1)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.assistant .about").nth(1)).to_contain_text("ended by")
        told = {"role": "assistant", "content": said}
        again = answer(server, first, told, {"role": "user", "content": [part("dog.jpg")]})
        expect(page.locator(".turn.assistant .text").nth(1)).to_have_text(again)


def test_pictures_are_removed_by_keys(browser: Any, server: Backend) -> None:
    with chat(browser, server) as page:
        page.locator("#message").focus()
        page.keyboard.press("Tab")
        button = page.get_by_role("button", name="Picture", exact=True)
        expect(button).to_be_focused()
        with page.expect_file_chooser() as chooser:
            page.keyboard.press("Enter")
        assert chooser.value.is_multiple()
        choose(page, *FILES)
        expect(thumbnails(page)).to_have_count(2)
        page.get_by_role("button", name="Remove cat.png").focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("button", name="Remove dog.jpg")).to_be_focused()
        page.keyboard.press("Space")
        expect(thumbnails(page)).to_have_count(0)
        expect(button).to_be_focused()
        expect(page.get_by_role("status").filter(has_text="dog.jpg removed")).to_be_visible()
        choose(page, "cat.png")
        page.get_by_role("button", name="New chat").click()
        expect(thumbnails(page)).to_have_count(0)


def test_a_file_that_is_not_taken_gets_a_sentence(browser: Any, server: Backend) -> None:
    with chat(browser, server) as page:
        told = page.locator(".told.bad")
        choose(page, "cat.png", **{"a.gif": b"GIF89a"})
        expect(told).to_have_text("a.gif is no PNG or JPEG file. 1 picture added")
        choose(page, **{"large.png": b"\x89PNG" + bytes(17 << 20)})
        expect(told).to_have_text("large.png has 17.0 MiB; at most 16.0 MiB are sent.")
        page.get_by_role("button", name="Remove cat.png").click()
        half = b"\x89PNG" + bytes(13 << 20)
        for names in (("a.png", "b.png"), ("c.png", "d.png")):
            choose(page, **dict.fromkeys(names, half))
            expect(thumbnails(page).first).to_be_attached()
        expect(told).to_have_text(
            "The pictures have 52.0 MiB; at most 48.0 MiB are sent. 1 picture added"
        )
        page.get_by_role("button", name="New chat").click()
        choose(page, **{"cut.png": FILES["cat.png"][:60]})
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".about.bad")).to_have_text(
            "messages[0].content[0]: the image ends early or is damaged"
        )


def test_who_can_not_see_is_shown_nothing(browser: Any, server: Backend) -> None:
    with chat(browser, server, "blind") as page:
        button = page.get_by_role("button", name="Picture", exact=True)
        expect(button).to_be_hidden()
        page.locator("#message").evaluate(DROP, ["cat.png", base64.b64encode(b"").decode()])
        expect(page.locator(".told.bad")).to_have_text("This model takes no pictures.")
        page.get_by_label("Model", exact=True).select_option("seeing")
        expect(button).to_be_visible()


@pytest.mark.parametrize("width", (390, 1280))
def test_nothing_is_cut_off(browser: Any, server: Backend, width: int) -> None:
    with chat(browser, server) as page:
        page.set_viewport_size({"width": width, "height": 850})
        choose(page, *FILES, **{f"{number}.png": FILES["cat.png"] for number in range(8)})
        expect(thumbnails(page)).to_have_count(10)
        cut = """all => all.filter(one => {
            const {left, right} = one.getBoundingClientRect();
            return right > left && (right > innerWidth + 1 || left < -1);
        }).map(one => one.outerHTML.slice(0, 120))"""
        assert page.locator("main *").evaluate_all(cut) == []
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.user img")).to_have_count(10)
        assert page.locator("main *").evaluate_all(cut) == []
