"""A folder's tokenizer and chat template are those that transformers makes of it."""

import json
import random
from pathlib import Path

import pytest
import transformers
from packaging.version import Version
from support import tokenizer_folders
from support.tokenizer_folders import FOLDERS
from tinsmith.api.tokenizer import Tokenizer
from tinsmith.chat.template import load_template
from tinsmith.formats import tokenizer as files
from transformers import AutoTokenizer

TEXTS = list(tokenizer_folders.texts())


@pytest.mark.parametrize("name", FOLDERS)
def test_ids_and_texts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tokenizer_folders.write(name, tmp_path)
    wanted, found = AutoTokenizer.from_pretrained(folder), Tokenizer(folder, name)
    assert found.backend.get_vocab() == wanted.get_vocab() == files.read(folder).tokens
    assert len(found) == len(wanted)
    for text in TEXTS:
        for special in (True, False):
            ids = wanted.encode(text, add_special_tokens=special)
            assert found.encode(text, add_special_tokens=special) == ids, text
            for skip in (True, False):
                said = wanted.decode(ids, skip_special_tokens=skip)
                assert found.decode(ids, skip_special_tokens=skip) == said
    draw = random.Random(3)
    for _ in range(200):  # and what nobody would write
        ids = [draw.randrange(len(wanted)) for _ in range(draw.randint(1, 20))]
        for skip in (True, False):
            said = wanted.decode(ids, skip_special_tokens=skip)
            assert found.decode(ids, skip_special_tokens=skip) == said


def chats() -> list[list[dict]]:
    """Conversations of these texts: a question, an answer, and another question."""
    rows = []
    for at in range(0, 60, 3):
        roles = zip(("user", "assistant", "user"), TEXTS[at : at + 3], strict=True)
        rows.append([{"role": role, "content": text} for role, text in roles])
    return rows


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, said, more) in FOLDERS.items()
        if "chat_template" in {**(said or {}), **{f.split(".")[0]: 1 for f in more}}
    ],
)
def test_prompts_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tokenizer_folders.write(name, tmp_path)
    wanted, found = AutoTokenizer.from_pretrained(folder), Tokenizer(folder, name)
    for messages in chats():
        for ask in (True, False):
            ids = wanted.apply_chat_template(messages, add_generation_prompt=ask, return_dict=False)
            assert found.apply_chat_template(messages, add_generation_prompt=ask) == ids


@pytest.mark.parametrize(
    "name", ("templates by name", "templates as an object", "a folder of templates")
)
def test_the_template_for_tools_is_transformers(name: str, tmp_path: Path) -> None:
    folder = tokenizer_folders.write(name, tmp_path)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    wanted = AutoTokenizer.from_pretrained(folder).get_chat_template(tools=tools)
    assert load_template(folder, tools=True).source == wanted == tokenizer_folders.PARTS
    assert load_template(folder).source == tokenizer_folders.CHATML


SAID = (
    "{% for m in messages %}{{ m.content }}|{{ m.thinking }}|{{ m.reasoning_content }}{% endfor %}"
)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"), reason="it passes messages as they are"
)
@pytest.mark.parametrize(
    "more",
    ({}, {"content": None}, {"reasoning": "why"}, {"thinking": "how", "reasoning_content": "why"}),
)
def test_messages_are_those_that_transformers_gives_templates(more: dict, tmp_path: Path) -> None:
    folder = tokenizer_folders.write("byte-level", tmp_path)
    (folder / "chat_template.jinja").write_text(SAID)
    messages = [{"role": "assistant", "content": "yes", **more}]
    wanted = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=False)
    assert Tokenizer(folder, "m").apply_chat_template(messages, tokenize=False) == wanted


def test_cleaning_up_is_refused_where_it_would_be_done(tmp_path: Path) -> None:
    for name, refused in (("words", True), ("byte-level", False)):
        folder = tokenizer_folders.write(name, tmp_path / name)
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        settings["clean_up_tokenization_spaces"] = True
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        load = Tokenizer(folder, name)
        if refused:
            with pytest.raises(ValueError, match="clean_up_tokenization_spaces is true"):
                load.encode("a")
        else:
            assert load.decode(load.encode("what ?")) == "what ?"


@pytest.mark.parametrize(
    ("file", "content"),
    (
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "<a>"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"300": 7}}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("added_tokens.json", {"<a>": "one"}),
        ("tokenizer_config.json", {"extra_special_tokens": [7]}),
    ),
)
def test_a_folder_that_is_no_tokenizers_is_a_sentence(
    file: str, content: dict, tmp_path: Path
) -> None:
    folder = tokenizer_folders.write("byte-level", tmp_path)
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"the added tokens of .* are none"):
        files.read(folder)


def test_a_template_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    folder = tokenizer_folders.write("byte-level", tmp_path)
    named = [{"name": ["x"], "template": "a"}, {"name": {}, "template": 3}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(ValueError, match="has no chat template"):
        load_template(folder)
    load_template.cache_clear()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is no text in UTF-8"):
        load_template(folder)
