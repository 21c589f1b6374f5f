"""A folder's tokenizer and chat template are those that transformers makes of it."""

import random
from pathlib import Path

import pytest
import tokenizer_folders
from tinsmith.api.tokenizer import Tokenizer
from tinsmith.files import tokenizer as files
from tokenizer_folders import FOLDERS
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
