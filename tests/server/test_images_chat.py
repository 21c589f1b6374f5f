"""Images in conversations through OpenAI's and Anthropic's clients: transformers' ids, the SDK's
answers, and refusals that name the message and the part. The models see and are real."""

import base64
import io
import threading
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import tinker
from PIL import Image
from support.chat_models import WEATHER
from support.images import jpeg, png
from support.seeing_chat import PAD, chat_folder, processor_of
from tinsmith.engine import image_cache
from tinsmith.server.backend import Backend
from tinsmith.server.http.overload import Arrivals, Overloaded
from tinsmith.server.service import bodies
from tinsmith.server.service.config import ServerConfig

SETTINGS: dict[str, Any] = {"max_tokens": 12, "seed": 5, "temperature": 1.3}
FILES = {
    "png": png(1, (70, 100)),
    "jpeg": jpeg(2, (300, 65)),
    "small": png(3, (8, 9)),
}
TOKENS_MAX = 40


def kind(file: bytes) -> str:
    return "png" if file.startswith(b"\x89") else "jpeg"


def in_openai(file: bytes, **more: Any) -> dict[str, Any]:
    url = f"data:image/{kind(file)};base64,{base64.b64encode(file).decode()}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def in_anthropic(file: bytes) -> dict[str, Any]:
    source = {"type": "base64", "media_type": f"image/{kind(file)}"}
    return {"type": "image", "source": {**source, "data": base64.b64encode(file).decode()}}


def in_transformers(file: bytes) -> dict[str, Any]:
    return {"type": "image", "image": Image.open(io.BytesIO(file))}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def conversations(image: Any, call: Any, result: Any) -> list[tuple[list[Any], list[Any], bool]]:
    """Messages, the files in them, and whether there are tools. `image` makes a part of a file,
    `call` and `result` messages of a tool's call and its content."""
    one, two, three = FILES.values()
    return [
        ([{"role": "user", "content": [image(one), text("What is it?")]}], [one], False),
        ([{"role": "user", "content": [text("Only "), text("this: "), image(two)]}], [two], False),
        (
            [
                {"role": "user", "content": [text("a"), image(one), text("b"), image(two)]},
                {"role": "assistant", "content": "Two."},
                {"role": "user", "content": [image(three), image(one)]},
            ],
            [one, two, three, one],
            False,
        ),
        (
            [
                {"role": "user", "content": "Look, and see."},
                call("look"),
                result("look", [text("This:"), image(two), text("!")]),
                {"role": "assistant", "content": "I see."},
                {"role": "user", "content": [image(one), text("and that?")]},
            ],
            [two, one],
            True,
        ),
    ]


def openai_call(key: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": '{"town": "Zug"}'}
    calls = [{"id": key, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def transformers_call(key: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"town": "Zug"}}
    calls = [{"id": key, "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def anthropic_call(key: str) -> dict[str, Any]:
    call = {"type": "tool_use", "id": key, "name": "weather", "input": {"town": "Zug"}}
    return {"role": "assistant", "content": [call]}


def tool_message(key: str, content: list[Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": key, "content": content}


def tool_block(key: str, content: list[Any]) -> dict[str, Any]:
    block = {"type": "tool_result", "tool_use_id": key, "content": content}
    return {"role": "user", "content": [block]}


IN_OPENAI = conversations(in_openai, openai_call, tool_message)
IN_ANTHROPIC = conversations(in_anthropic, anthropic_call, tool_block)
IN_TRANSFORMERS = conversations(in_transformers, transformers_call, tool_message)
CASES = pytest.mark.parametrize("case", range(len(IN_OPENAI)))
MODELS = pytest.mark.parametrize("model", ("qwen3_5", "qwen3_vl"))


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    models = {name: chat_folder(name) for name in ("qwen3_5", "qwen3_vl")}
    saved = tmp_path_factory.mktemp("seeing")
    settings = ServerConfig(
        models, checkpoints=saved, device="cpu", threads=1, image_tokens=TOKENS_MAX
    )
    with Backend(settings) as started:
        yield started


@pytest.fixture
def client(backend) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{backend.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def claude(backend) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=backend.url, api_key="any", max_retries=0)


def wanted_ids(model: str, case: int) -> list[int]:
    """transformers' ids of one of the conversations."""
    messages, _, tools = IN_TRANSFORMERS[case]
    # Which looks for images in parts, and fails in a bare text.
    messages = [
        {
            **one,
            "content": [text(one["content"])] if type(one["content"]) is str else one["content"],
        }
        for one in messages
    ]
    made = processor_of(chat_folder(model)).apply_chat_template(
        messages,
        tools=[WEATHER] if tools else None,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
    )
    return made["input_ids"][0]


def in_openais_route(client: openai.OpenAI, model: str, case: int, **more: Any) -> Any:
    messages, _, tools = IN_OPENAI[case]
    given = {"tools": [WEATHER]} if tools else {}
    return client.chat.completions.create(
        model=model,
        messages=messages,
        **SETTINGS,
        **given,
        **more,
        extra_body={"return_token_ids": True},
    )


def drawn(backend: Backend, model: str, ids: Sequence[int], files: Sequence[bytes]) -> list[int]:
    """What the SDK draws behind the same ids, in which each run of the placeholder is an image."""
    pad = processor_of(chat_folder(model)).image_token_id
    left, chunks = iter(files), list[Any]()
    for is_pad, run in groupby(ids, lambda one: one == pad):
        found = list(run)
        if is_pad:
            file = next(left)
            chunk = tinker.types.ImageChunk(
                data=file, format=kind(file), expected_tokens=len(found)
            )
            chunks.append(chunk)
        else:
            chunks.append(tinker.types.EncodedTextChunk(tokens=found))
    assert next(left, None) is None
    with backend.service_client() as service:
        sampler = service.create_sampling_client(base_model=model).result()
        given = tinker.SamplingParams(**SETTINGS)
        prompt = tinker.ModelInput(chunks=chunks)
        [sequence] = sampler.sample(prompt, 1, given).result().sequences
    return list(sequence.tokens)


# ---- the ids and the answers ----


@MODELS
@CASES
def test_a_chats_ids_are_transformers_and_its_answer_is_the_sdks(
    backend, client, model: str, case: int
) -> None:
    wanted = wanted_ids(model, case)
    reply = in_openais_route(client, model, case)
    assert reply.prompt_token_ids == wanted and reply.usage.prompt_tokens == len(wanted)
    assert reply.choices[0].token_ids == drawn(backend, model, wanted, IN_OPENAI[case][1])


def test_a_stream_has_the_same_tokens(client) -> None:
    reply = in_openais_route(client, "qwen3_5", 2)
    options = {"include_usage": True}
    *chunks, last = in_openais_route(client, "qwen3_5", 2, stream=True, stream_options=options)
    assert chunks[0].prompt_token_ids == reply.prompt_token_ids
    assert last.usage.prompt_tokens == len(reply.prompt_token_ids)
    said = "".join(one.choices[0].delta.content or "" for one in chunks)
    assert said == reply.choices[0].message.content


@CASES
def test_a_messages_answer_is_that_of_openais_route(client, claude, case: int) -> None:
    messages, _, has_tools = IN_ANTHROPIC[case]
    function = WEATHER["function"]
    tool: Any = {**function, "input_schema": function["parameters"]}
    del tool["parameters"]
    tools: Any = {"tools": [tool]} if has_tools else {}
    given = {"model": "qwen3_5", "messages": messages, **tools}
    wanted = in_openais_route(client, "qwen3_5", case)
    count = len(wanted_ids("qwen3_5", case))
    assert claude.messages.count_tokens(**given).input_tokens == count
    extra = {"seed": SETTINGS["seed"], "temperature": SETTINGS["temperature"]}
    reply = claude.messages.create(**given, max_tokens=SETTINGS["max_tokens"], extra_body=extra)
    assert reply.usage.input_tokens == count
    said = "".join(block.text for block in reply.content if block.type == "text")
    assert said == wanted.choices[0].message.content


def test_images_beside_a_tools_result_come_in_the_order_of_the_template(backend, claude) -> None:
    """Results are messages before the rest of their message, wherever they stand in it; that an
    image differs shows in what is drawn."""
    first, second = png(4, (64, 64)), png(5, (64, 64))
    images = [in_anthropic(first), in_anthropic(second)]
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}

    def asked(said: dict[str, Any], told: dict[str, Any], late: bool) -> list[Any]:
        result = {"type": "tool_result", "tool_use_id": "a", "content": [told]}
        return [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [said, result] if late else [result, said]},
        ]

    def answer(messages: list[Any]) -> Any:
        extra = {"seed": 1, "temperature": 1.0}
        return claude.messages.create(
            model="qwen3_5", messages=messages, max_tokens=30, extra_body=extra
        ).content

    assert answer(asked(*images, late=True)) == answer(asked(*images, late=False))
    assert answer(asked(*images, late=True)) != answer(asked(*images[::-1], late=True))


def test_an_errors_image_stays_an_image(claude) -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}

    def count(content: list[Any], **more: Any) -> int:
        result = {"type": "tool_result", "tool_use_id": "a", "content": content, **more}
        messages: Any = [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [result]},
        ]
        return claude.messages.count_tokens(model="qwen3_5", messages=messages).input_tokens

    image = in_anthropic(FILES["small"])
    assert count([image], is_error=True) == count([text("Error: "), image])
    assert count([text("No"), image], is_error=True) == count([text("Error: No"), image])


def test_a_url_may_be_a_bare_text_and_have_a_detail(client) -> None:
    part = in_openai(FILES["png"])
    asked = []
    for one in (part, {**part, "image_url": part["image_url"]["url"]}, in_openai(FILES["png"],
                detail="high")):  # fmt: skip
        reply = client.chat.completions.create(
            model="qwen3_5",
            messages=[{"role": "user", "content": [one]}],
            **SETTINGS,
        )
        asked.append(reply.choices[0].message.content)
    assert asked[0] == asked[1] == asked[2]


def test_the_placeholder_in_a_text_without_images_is_text(client, backend) -> None:
    """In a chat as in a completion, whose prompt has no images."""
    processor = processor_of(chat_folder("qwen3_5"))
    said = f"What is {PAD}?"
    messages: Any = [{"role": "user", "content": said}]
    body = {"return_token_ids": True}
    reply = client.chat.completions.create(
        model="qwen3_5", messages=messages, **SETTINGS, extra_body=body
    )
    wanted = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert reply.prompt_token_ids == wanted and processor.image_token_id in wanted
    done = client.completions.create(model="qwen3_5", prompt=said, **SETTINGS, extra_body=body)
    assert done.choices[0].prompt_token_ids == processor.tokenizer.encode(said)


# ---- refusals ----


def damaged(file: bytes) -> bytes:
    """A PNG file whose header and checksums are good, and whose pixels are cut."""
    begin = file.index(b"IDAT")
    size = int.from_bytes(file[begin - 4 : begin])
    part = b"IDAT" + file[begin + 4 : begin + size // 2]
    made = file[: begin - 4] + (len(part) - 4).to_bytes(4) + part
    return made + zlib.crc32(part).to_bytes(4) + file[begin + 8 + size :]


WIDE = png(6, (256, 256))  # 64 tokens
URLS = [
    ("http://127.0.0.1:1/a.png", "is at 'http://127.0.0.1:1/a.png', which is not opened here"),
    ("https://example.org/a.png", "which is not opened here: send its bytes as data:image/png;"),
    ("file:///etc/passwd", "is at 'file:///etc/passwd', which is not opened here"),
    ("/etc/passwd", "is at '/etc/passwd', which is not opened here"),
    ("", "is at '', which is not opened here"),
    (f"data:image/png;{'a' * 300};base64,abc", "the image's URL must be data:image/png;base64,"),
    ("data:image/png,abc", "the image's URL must be data:image/png;base64,"),
    ("data:image/png;base64", "the image's URL must be data:image/png;base64,"),
    ("data:image/gif;base64,R0lG", "media type must be image/png or image/jpeg, 'image/gif' came"),
    ("data:;base64,R0lG", "media type must be image/png or image/jpeg, '' came"),
    ("data:image/png;base64,a", "the image's data is no base64"),
    ("data:image/png;base64,ä", "the image's data is no base64"),
    ("data:image/png;base64,R0lG", "the image is no PNG file"),
    ("data:image/jpeg;base64,", "the image is no JPEG file"),
    (in_openai(FILES["png"][:-30])["image_url"]["url"], "the image ends early or is damaged"),
    (in_openai(damaged(FILES["png"]))["image_url"]["url"], "the image ends early or is damaged"),
    (in_openai(WIDE)["image_url"]["url"], "has 64 tokens; this server takes 40 (--image-tokens)"),
    (in_openai(png(1, (1, 300)))["image_url"]["url"], "more than 200 times as long as wide"),
]


def refused(backend: Backend, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{backend.url}{path}", json={"model": "qwen3_5", "max_tokens": 1, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize(("url", "sentence"), URLS)
def test_a_url_is_refused_with_its_message_and_part(backend, url: str, sentence: str) -> None:
    good = in_openai(FILES["small"])
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [
        {"role": "user", "content": [good]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [text("and"), part]},
    ]
    error = refused(backend, "/v1/chat/completions", {"messages": messages})
    assert error["message"].startswith("messages[2].content[1]: ")
    assert sentence in error["message"]
    assert backend._service.arrivals.bytes == 0


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        ({"type": "image_url"}, "content[0].image_url must have a url, which is a text"),
        ({"type": "image_url", "image_url": {"url": 5}}, "must have a url, which is a text"),
        (in_openai(FILES["small"], detail="low"), "image_url.detail is 'low', which this server"),
        (in_openai(FILES["small"], size=3), "image_url.size is no setting of this server"),
        ({"type": "input_audio"}, "a part of type 'input_audio'; this server reads text and im"),
        ({"type": "image", "image": "x"}, "a part of type 'image'; this server reads text and"),
    ],
)
def test_another_part_is_refused_by_name(backend, part: dict[str, Any], sentence: str) -> None:
    messages = [{"role": "user", "content": [part]}]
    error = refused(backend, "/v1/chat/completions", {"messages": messages})
    assert sentence in error["message"] and error["message"].startswith("messages[0].content")


@pytest.mark.parametrize("role", ("system", "assistant"))
def test_other_roles_have_no_images(backend, role: str) -> None:
    messages = [{"role": role, "content": [in_openai(FILES["small"])]}, {"role": "user",
                "content": "x"}]  # fmt: skip
    error = refused(backend, "/v1/chat/completions", {"messages": messages})
    assert error["message"] == (
        f"messages[0].content[0] is an image in a message of {role}; images can be in those of "
        "user and tool"
    )


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ({"type": "url", "url": "http://a.b/c.png"}, "has a source of type 'url', which is not op"),
        ({"type": "file", "file_id": "f"}, "has a source of type 'file', which is not opened here"),
        (None, "has no source"),
        ({"type": "base64", "media_type": "image/webp", "data": ""}, ": the image's media type mu"),
        ({"type": "base64", "media_type": "image/png", "data": "R0lG"}, ": the image is no PNG"),
        ({"type": "base64", "media_type": "image/png"}, "has no data"),
        (in_anthropic(WIDE)["source"], ": the image has 64 tokens; this server takes 40"),
    ],
)
@pytest.mark.parametrize("path", ("/v1/messages", "/v1/messages/count_tokens"))
@pytest.mark.parametrize("inside", (False, True))
def test_a_source_is_refused_with_its_message_and_block(
    backend, path: str, inside: bool, source: Any, sentence: str
) -> None:
    block = {"type": "image", **({} if source is None else {"source": source})}
    content, where = [text("and"), block], "messages[0].content[1]"
    if inside:
        content = [{"type": "tool_result", "tool_use_id": "a", "content": content}]
        where = "messages[0].content[0].content[1]"
    body = {"messages": [{"role": "user", "content": content}]}
    if path.endswith("count_tokens"):
        reply = httpx.post(f"{backend.url}{path}", json={"model": "qwen3_5", **body})
        assert reply.status_code == 400
        error = reply.json()["error"]
    else:
        error = refused(backend, path, body)
    assert error["message"].startswith(f"{where}{'' if sentence[0] == ':' else ' '}{sentence}")


def test_a_text_with_the_placeholder_is_refused_beside_an_image(backend) -> None:
    """It would take the image's place."""
    image = in_openai(FILES["small"])
    tool = {"type": "function", "function": {"name": PAD, "parameters": {}}}
    for body in (
        {"messages": [{"role": "user", "content": [text(f"a{PAD}"), image]}]},
        {
            "messages": [
                {"role": "system", "content": PAD},
                {"role": "user", "content": [image]},
            ]
        },
        {"messages": [{"role": "user", "content": [image]}], "tools": [tool]},
    ):
        error = refused(backend, "/v1/chat/completions", body)
        assert error["message"].startswith(f"a text of the request has {PAD}, which stands for an")
    begun = [
        {"role": "user", "content": [in_anthropic(FILES["small"])]},
        {"role": "assistant", "content": PAD},
    ]
    error = refused(backend, "/v1/messages", {"messages": begun})
    assert error["message"].startswith(f"a text of the request has {PAD}")


def test_a_prompt_that_is_too_long_decodes_nothing(backend, monkeypatch) -> None:
    decoded = []
    monkeypatch.setattr(image_cache, "decode", lambda *arguments: decoded.append(arguments))
    image = in_openai(png(99, (160, 160)))  # 25 tokens
    messages = [{"role": "user", "content": [image] * 40}]
    error = refused(backend, "/v1/chat/completions", {"messages": messages})
    assert error["code"] == "context_length_exceeded" and not decoded
    assert "tokens; the model's context is 1024" in error["message"]


def test_a_template_that_writes_no_images_is_refused(tmp_path: Path) -> None:
    """One of text, although the model sees."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in chat_folder("qwen3_5").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    models = {"qwen3_5": folder}
    with Backend(ServerConfig(models, checkpoints=tmp_path / "saved", device="cpu")) as backend:
        messages = [{"role": "user", "content": [in_openai(FILES["small"])]}]
        error = refused(backend, "/v1/chat/completions", {"messages": messages})
        assert error["message"] == (
            "the model's chat template has written 0 places for images, and there are 1"
        )


def test_a_model_that_cannot_see_says_so(server) -> None:
    """Before anything else of the prompt."""
    for path, part in (
        ("/v1/chat/completions", in_openai(FILES["small"])),
        ("/v1/messages", in_anthropic(FILES["small"])),
    ):
        body = {"messages": [{"role": "user", "content": [part]}], "model": "tiny"}
        error = refused(server, path, body)
        where = "messages[0].content[0]: this model takes no images: config.json names "
        assert error["message"].startswith(where)


# ---- bytes and threads ----


def test_a_body_may_be_large_if_images_are(backend, monkeypatch) -> None:
    monkeypatch.setattr(bodies, "JSON_BYTES_MAX", 1 << 13)
    file = png(7, (150, 150))
    assert len(file) > 1 << 15

    def reply(*parts: dict[str, Any]) -> httpx.Response:
        messages = [{"role": "user", "content": list(parts)}]
        body = {"model": "qwen3_5", "max_tokens": 1, "messages": messages}
        return httpx.post(f"{backend.url}/v1/chat/completions", json=body)

    assert reply(in_openai(file), text("a" * 100)).status_code == 200
    for parts, sentence in (
        ((in_openai(file), text("a" * (1 << 13))), "more than 8192 bytes beside its images, the"),
        ((text("a" * (1 << 13)),), "more than 8192 bytes, the most"),
    ):
        found = reply(*parts)
        assert found.status_code == 413 and sentence in found.json()["error"]["message"]


def test_without_memory_to_decode_a_request_is_to_come_again(backend, monkeypatch) -> None:
    take = Arrivals.acquire

    async def refused(self: Arrivals, entry: Any, size: int) -> None:
        if size > 1 << 20:
            raise Overloaded("the server is full; come again", 5)
        await take(self, entry, size)

    monkeypatch.setattr(Arrivals, "acquire", refused)
    image = png(10, (400, 300))
    for path, part, kind in (
        ("chat/completions", in_openai(image), "rate_limit_error"),
        ("messages", in_anthropic(image), "rate_limit_error"),
    ):
        messages = [{"role": "user", "content": [part]}]
        body = {"model": "qwen3_5", "max_tokens": 1, "messages": messages}
        reply = httpx.post(f"{backend.url}/v1/{path}", json=body)
        assert reply.status_code == 429 and reply.headers["retry-after"] == "5"
        assert reply.json()["error"]["type"] == kind
    assert backend._service.arrivals.bytes == 0


def test_images_are_decoded_beside_the_event_loop_and_counted(backend, claude, monkeypatch) -> None:
    names, taken = list[str](), list[int]()
    decode, take = image_cache.decode, Arrivals.acquire

    def noted(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return decode(*arguments)

    async def counted(self: Arrivals, entry: Any, size: int) -> None:
        taken.append(size)
        await take(self, entry, size)

    monkeypatch.setattr(image_cache, "decode", noted)
    monkeypatch.setattr(Arrivals, "acquire", counted)
    messages: Any = [{"role": "user", "content": [in_anthropic(png(8, (150, 150)))]}]
    claude.messages.create(model="qwen3_5", messages=messages, max_tokens=1)
    assert len(names) == 1 and names[0].startswith("tinsmith-beside")
    assert max(taken) >= image_cache.DECODING_BYTES * 150 * 150
    assert backend._service.arrivals.bytes == 0
    names.clear()
    claude.messages.count_tokens(model="qwen3_5", messages=[{"role": "user", "content": [
        in_anthropic(png(9, (150, 150)))]}])  # fmt: skip
    assert not names  # which needs its header alone
