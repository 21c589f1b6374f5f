"""Model.chat with images: transformers' ids and the sampler's tokens, in every form of an image."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinsmith
from PIL import Image
from support.chat_models import make_model
from support.images import jpeg, png
from support.seeing_chat import PAD, chat_folder, processor_of
from tinsmith.api.conversations import SeenPrompt
from tinsmith.chat.images import ImageRows

FILE, OTHER = png(1, (70, 100)), jpeg(2, (64, 65))
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"
DRAWN: dict[str, Any] = {"seed": 3, "max_tokens": 8}


@pytest.fixture(scope="module")
def seeing() -> Iterator[tinsmith.Model]:
    with tinsmith.Model(chat_folder(), device="cpu", threads=1) as model:
        yield model


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def image(given: Any) -> dict[str, Any]:
    return {"type": "image", "image": given}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_its_prompt_is_transformers_and_its_tokens_are_the_samplers(seeing) -> None:
    one, two = seeing.image(FILE), seeing.image(OTHER)
    said: list[str] = []
    messages = user(image(one), text("and"), image(two), image(one), text("?"))
    answer = seeing.chat(messages, on_text=said.append, **DRAWN)
    assert "".join(said) == answer.text == answer.message["content"]
    images = [part for part in answer.prompt if isinstance(part, tinsmith.Image)]
    assert [part is other for part, other in zip(images, (one, two, one), strict=True)] == [
        True
    ] * 3
    processor = processor_of(chat_folder())
    opened = [image(Image.open(io.BytesIO(file))) for file in (FILE, OTHER, FILE)]
    wanted = processor.apply_chat_template(
        user(opened[0], text("and"), *opened[1:], text("?")),
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"][0]
    pad = processor.image_token_id
    spread = list[int]()
    for part in answer.prompt:
        spread += [pad] * len(part) if isinstance(part, tinsmith.Image) else [part]
    assert spread == wanted
    [drawn] = seeing.sampler().sample(answer.prompt, stop=[], **DRAWN)
    assert drawn.tokens.tolist()[: len(answer.tokens)] == answer.tokens.tolist()
    scored = seeing.logprobs([*answer.prompt, *answer.tokens])[-len(answer.tokens) :]
    np.testing.assert_array_equal(scored, answer.logprobs)


def test_images_may_stand_next_to_each_other(seeing) -> None:
    """In a prompt of a template that writes nothing between them."""
    one, two = seeing.image(FILE), seeing.image(OTHER)
    pad = seeing.engine.loaded.image_token
    rows = ImageRows(pad, [len(one), len(two)]).spread([5, pad, pad, 7])
    prompt = SeenPrompt(np.asarray(rows, np.int32), pad, [one, two])
    assert prompt.parts == [5, one, two, 7]
    assert prompt.rows.tolist() == [5, *one.ids, *two.ids, 7]


def test_an_image_comes_in_every_form(seeing, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(FILE)
    held = seeing.image(FILE)
    wanted = seeing.chat(user(image(held), text("?")), **DRAWN)
    for part in (
        *map(image, (path, str(path), FILE, Image.open(path))),
        {"type": "image_url", "image_url": {"url": URL, "detail": "auto"}},
        {"type": "image_url", "image_url": URL},
    ):
        answer = seeing.chat(user(part, text("?")), **DRAWN)
        assert answer.tokens.tolist() == wanted.tokens.tolist()
        assert len(answer.prompt) == len(wanted.prompt)


def test_without_images_a_prompt_is_an_array_and_its_parts_are_texts(seeing) -> None:
    answer = seeing.chat(user(text("a"), text(PAD)), **DRAWN)
    assert answer.prompt.tolist() == seeing.tokenizer.apply_chat_template(
        user(text("a"), text(PAD)), add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("part", "error", "match"),
    [
        (image(5), TypeError, r"^messages\[0\].content\[1\]: an image is the path of a PNG or"),
        ({"type": "image"}, TypeError, r"^messages\[0\].content\[1\]: an image is the path"),
        (image(b"GIF89a"), ValueError, r"^messages\[0\].content\[1\]: the image is no PNG or JPEG"),
        (image("nowhere.png"), FileNotFoundError, "nowhere.png"),
        (
            {"type": "image_url", "image_url": {"url": "http://a.b/c.png"}},
            ValueError,
            r"^messages\[0\].content\[1\]: the image is at 'http://a.b/c.png', which is not opened",
        ),
        ({"type": "image_url"}, TypeError, r"content\[1\].image_url must have a url"),
        (
            {"type": "image_url", "image_url": "data:image/png;base64,?"},
            ValueError,
            r"^messages\[0\].content\[1\]: the image's data is no base64",
        ),
        ({"type": "video", "video": "x"}, ValueError, r"messages\[0\] has the part"),
        (text(PAD), ValueError, "which stands for an image"),
    ],
)
def test_what_can_not_be_an_image_is_refused(seeing, part: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        seeing.chat(user(image(FILE), part))


def test_a_model_that_does_not_see_says_so(tmp_path: Path) -> None:
    with (
        tinsmith.Model(make_model(tmp_path / "model"), device="cpu", threads=1) as blind,
        pytest.raises(ValueError, match=r"^messages\[0\].content\[0\]: .* has no vision tower$"),
    ):
        blind.chat(user(image(FILE)))


def test_ids_among_a_prompts_parts_are_those_of_text(seeing) -> None:
    """Not rows of another image, of which a caller may have the ids."""
    picture = seeing.image(FILE)
    with pytest.raises(IndexError, match=rf"\[1\] has id {picture.ids.min()}; ids are 0 or more"):
        seeing.logprobs([1, picture.ids, picture])
