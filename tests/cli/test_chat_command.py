"""`tinsmith chat` and `tinsmith sample`: the answers are the sampler's, however they are shown."""

import base64
import io
import itertools
import json
import signal
import threading
import time
from pathlib import Path

import pytest
import tinsmith
from support.chat_models import make_model
from support.images import jpeg, png
from support.seeing_chat import chat_folder
from tinsmith.cli import commands
from tinsmith.cli.chat_command import ChatSettings, Conversation, Speaker, converse, inputs

DRAWN = {"seed": 7, "max_tokens": 60, "temperature": 1.2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("talk") / "model")


@pytest.fixture(scope="module")
def speaker(folder: Path) -> Speaker:
    from support import tiny_models

    model = tinsmith.Model(folder, device="cpu", threads=1)
    adapter = model.lora(rank=4, seed=1)
    tiny_models.randomize(adapter.core)
    return Speaker(model, adapter)


def begin(speaker: Speaker, **settings) -> tuple[Conversation, list[str]]:
    written: list[str] = []
    return Conversation(speaker, ChatSettings(**{**DRAWN, **settings}), written.append), written


def lines(*texts: str):
    """What reads these lines, and then the end."""
    left = list(texts)

    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        return left.pop(0)

    return read


def answer(speaker: Speaker, messages: list[dict[str, str]], *, base: bool = False, **drawn) -> str:
    """What the sampler says."""
    adapter = None if base else speaker.adapter
    given = {"adapter": adapter, **DRAWN, **drawn}
    [one] = speaker.model.sampler().sample(speaker.chat.prompt(messages), **given)
    return speaker.chat.tokenizer.decode(one.tokens.tolist())


def test_a_conversation_is_the_samplers_and_remembers_itself(speaker) -> None:
    talk, written = begin(speaker)
    talk.system = "Be brief."
    converse(talk, lines("Hello", "", "And now?"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    first = answer(speaker, messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And now?"}]
    second = answer(speaker, messages)
    assert "".join(written) == f"{first}\n{second}\n"
    assert talk.messages == [*messages[1:], {"role": "assistant", "content": second}]
    assert first != second


def test_the_base_answers_beside_the_adapter(speaker) -> None:
    talk, written = begin(speaker)
    converse(talk, lines("/compare", "Hello"))
    said = [{"role": "user", "content": "Hello"}]
    base, own = answer(speaker, said, base=True), answer(speaker, said)
    shown = f"without the adapter: {base}\nwith it: {own}\n"
    assert "".join(written) == f"compare with base: on\n{shown}" and base != own
    assert talk.messages[-1]["content"] == own
    alone, told = begin(Speaker(speaker.model))
    converse(alone, lines("/compare"))
    assert "no adapter to compare with" in told[0]


def test_an_interrupt_ends_the_answer_and_not_the_conversation(speaker, monkeypatch) -> None:
    talk, written = begin(speaker, max_tokens=900)
    decoder = speaker.model.engine._decoder
    step, steps, interrupted = decoder.step, itertools.count(), threading.Event()

    def slow() -> None:
        time.sleep(0.01)
        if next(steps) > 20:  # never at the end before the interrupt, however busy the machine is
            interrupted.wait(60)
        step()

    monkeypatch.setattr(decoder, "step", slow)

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 3:
            interrupted.set()
            signal.raise_signal(signal.SIGINT)

    talk.write = write
    talk.say("Hello")
    assert written[-2:] == [" …", "\n"]
    cut = talk.messages[-1]["content"]
    assert not decoder.active
    whole = answer(speaker, talk.messages[:1], max_tokens=900)
    assert cut and whole.startswith(cut.rstrip("\ufffd")) and len(cut) < len(whole)
    monkeypatch.undo()
    talk.write = written.append
    talk.settings = ChatSettings(**DRAWN)
    talk.say("Go on")
    assert talk.messages[-1]["content"] == answer(speaker, talk.messages[:3])


def test_what_can_not_be_done_is_a_sentence_and_the_conversation_goes_on(speaker, tmp_path) -> None:
    talk, written = begin(speaker)
    file = tmp_path / "talk.json"
    converse(
        talk,
        lines(
            "/nothing", "/temperature -1", "/top_p 2", "/max_tokens 0", "/seed x", "/save",
            "/temperature none", "/top_p none",
            "/temperature 0", "/seed none", "/max_tokens 5", "/system Be kind.", "word " * 2000,
            "Hello", f"/save {file}", "/help", "/reset", "/exit", "never read",
        ),
    )  # fmt: skip
    text = "".join(written)
    for told in ("there is no /nothing", "temperature must be at least 0", "2.0", "0 came",
                 "could not convert string to float: 'none'", "say where to", "temperature: 0.0",
                 "seed: None", "the model reads from 1 to 1024", "/compare"):  # fmt: skip
        assert told in text or "invalid literal" in text, told
    assert "invalid literal for int" in text and "never" not in text
    assert talk.settings == ChatSettings(0.0, 1.0, None, 5) and talk.messages == []
    saved = json.loads(file.read_text())["messages"]
    asked = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    own = answer(speaker, asked, temperature=0.0, max_tokens=5)
    assert saved == [*asked, {"role": "assistant", "content": own}]


def test_several_lines_stand_between_quotes() -> None:
    def read(prompt: str) -> str:
        if not left:
            raise EOFError
        if (line := left.pop(0)) is None:
            raise KeyboardInterrupt
        return line

    left = ["one", '"""two', " three", 'four"""', "  ", '"""five', None, '"""six"""', '"""cut']
    assert list(inputs(read)) == ["one", "two\n three\nfour", "six"]


@pytest.mark.parametrize("chat", (True, False))
def test_a_samples_json_is_the_samplers(folder, speaker, capsys, monkeypatch, chat) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    options = ["--seed", "7", "--max-tokens", "60", "--temperature", "1.2", "-n", "3"]
    options += ["--device", "cpu", "--chat"] if chat else ["--device", "cpu"]
    assert commands.main(["sample", str(folder), "-", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    said = [{"role": "user", "content": "Hello"}]
    prompt = speaker.chat.prompt(said) if chat else speaker.chat.encode("Hello")
    wanted = speaker.model.sampler().sample(prompt, num_samples=3, **DRAWN)
    assert found["prompt_tokens"] == prompt and len(found["samples"]) == 3
    for one, sample in zip(found["samples"], wanted, strict=True):
        assert one["tokens"] == sample.tokens.tolist()
        assert one["logprobs"] == sample.logprobs.tolist()
        assert one["text"] == speaker.chat.tokenizer.decode(one["tokens"])
        assert one["stop_reason"] == sample.stop_reason


def test_the_commands_lines(folder, speaker, tmp_path, capsys, monkeypatch) -> None:
    speaker.adapter.save(tmp_path / "adapter")
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    common = ["--adapter", str(tmp_path / "adapter"), "--device", "cpu", "--seed", "7"]
    settings = ["--max-tokens", "60", "--temperature", "1.2"]
    assert commands.main(["chat", str(folder), *common, *settings]) == 0
    assert capsys.readouterr().out == answer(speaker, [{"role": "user", "content": "Hello"}]) + "\n"
    for arguments, sentence in (
        (["sample", str(folder), "x", "--system", "y"], "add --chat"),
        (["chat", str(folder), "--adapter", str(tmp_path / "no")], "no"),
        (["chat", str(tmp_path / "none")], "there is no model"),
    ):
        assert commands.main(arguments) == 1
        assert sentence in capsys.readouterr().err


# ---- images ----


@pytest.fixture(scope="module")
def seeing() -> Speaker:
    return Speaker(tinsmith.Model(chat_folder(), device="cpu", threads=1))


def parts_of(*files: bytes) -> list[dict]:
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    return [{"type": "image_url", "image_url": {"url": url}} for url in urls]


def test_images_go_with_the_first_message_of_a_conversation(seeing, tmp_path) -> None:
    talk, written = begin(seeing)
    talk.images = parts_of(png(1, (64, 80)), png(2, (40, 40)))
    converse(talk, lines("What?", "Why?", f"/save {tmp_path / 'saved.json'}", "/reset", "What?"))
    first = {"role": "user", "content": [*talk.images, {"type": "text", "text": "What?"}]}
    one = seeing.model.chat([first], **DRAWN).message
    second = [first, one, {"role": "user", "content": "Why?"}]
    two = seeing.model.chat(second, **DRAWN).message
    said = [one["content"], two["content"]]
    assert "".join(written).startswith(f"{said[0]}\n{said[1]}\n")
    saved = json.loads((tmp_path / "saved.json").read_text())
    assert saved == {"messages": [*second, two]}
    assert talk.messages == [first, one] and written.count("\n") >= 3


def test_the_commands_images(folder, seeing, tmp_path, capsys, monkeypatch) -> None:
    photo, other, none = (tmp_path / name for name in ("photo.png", "a.jpg", "none.png"))
    photo.write_bytes(png(1, (64, 80)))
    other.write_bytes(jpeg(2, (40, 40)))
    none.write_bytes(b"GIF89a")
    monkeypatch.setattr("sys.stdin", io.StringIO("What?\n"))
    settings = ["--device", "cpu", "--seed", "7", "--max-tokens", "60", "--temperature", "1.2"]
    given = ["--image", str(photo), "--image", str(other)]
    assert commands.main(["chat", str(chat_folder()), *given, *settings]) == 0
    images = [{"type": "image", "image": path} for path in (photo, other)]
    content = [*images, {"type": "text", "text": "What?"}]
    wanted = seeing.model.chat([{"role": "user", "content": content}], **DRAWN)
    assert capsys.readouterr().out == wanted.text + "\n"
    for model, file, sentence in (
        (chat_folder(), none, "none.png is no PNG or JPEG file"),
        (folder, photo, "photo.png: config.json names Qwen3ForCausalLM, which has no vision tower"),
    ):
        assert commands.main(["chat", str(model), "--image", str(file)]) == 1
        assert sentence in capsys.readouterr().err
