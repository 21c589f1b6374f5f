"""Conversations as a model sees them: prompts are those of transformers, text comes in whole
characters, and calls are found however their text is cut."""

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT
from support.chat_models import CALL, CONVERSATION, TEMPLATES, WEATHER, make_tokenizer
from tinsmith.chat.chat import Answer, Chat
from tinsmith.chat.template import ChatTemplate
from tinsmith.chat.text import Reading, Stops, Text, pieces, token_bytes
from tinsmith.chat.tools import (
    FORMATS,
    ChannelReader,
    Piece,
    Thought,
    ToolCall,
    ToolReader,
    format_of,
)
from tinsmith.server.inference import anthropic_messages, openai_chat
from tinsmith.server.inference.serving import joined
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

TEXTS = ("Grüße aus Zürich, 你好世界", "😀😃 a\u0301 …", "plain text", "\ufffd broken \ufffd", "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tokenizer with one of the templates."""
    root = tmp_path_factory.mktemp("chat")

    def make(name: str, as_file: bool = False) -> Path:
        found = root / f"{name}{as_file}"
        if not found.exists():
            make_tokenizer(found, TEMPLATES.get(name), as_file=as_file)
        return found

    return make


# ---- prompts ----


@pytest.mark.parametrize("as_file", (False, True))
@pytest.mark.parametrize("tools", ([], [WEATHER]))
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_one_that_transformers_makes(folder, name, tools, as_file) -> None:
    from transformers import AutoTokenizer

    place = folder(name, as_file)
    settings = {"enable_thinking": False} if name == "qwen" else {}
    wanted = AutoTokenizer.from_pretrained(place).apply_chat_template(
        CONVERSATION,
        tools=tools or None,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=False,
        **settings,
    )
    chat = Chat(place)
    assert chat.prompt(CONVERSATION, tools, settings) == wanted
    if name == "qwen":
        assert chat.tokenizer.decode(wanted, skip_special_tokens=False).endswith("</think>\n\n")
        assert chat.prompt(CONVERSATION, tools) != wanted
    begun = chat.prompt(CONVERSATION, tools, settings, prefix="So")
    assert begun == wanted + chat.encode("So")


def test_a_developer_is_the_system_where_a_template_knows_none(folder) -> None:
    chat = Chat(folder("qwen"))
    asked = [{"role": role, "content": "Be kind."} for role in ("developer", "system")]
    first, second = (chat.prompt([one, *CONVERSATION[1:]]) for one in asked)
    assert first == second


@pytest.mark.parametrize(
    ("template", "sentence"),
    (
        ("{{ messages[3].content }}", "refuses this: list object has no element 3"),
        ("{{ raise_exception('roles must alternate') }}", "refuses this: roles must alternate"),
        ("{{ messages.append(1) }}", "refuses this: .*unsafe"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses this: .*unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", "refuses this: Range too big"),
        ("{{ messages | no_such_filter }}", "can't be read: No filter named"),
        ("{% if %}", "can't be read: Expected an expression"),
    ),
)
def test_a_template_that_fails_is_a_sentence(template: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ChatTemplate(template, Path("tokenizer_config.json")).render([{"role": "user"}])


def test_what_a_model_can_not_do_is_a_sentence(folder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        Chat(folder("none")).prompt(CONVERSATION)
    make_tokenizer(tmp_path / "mute", "{{ messages[0].content }}")
    with pytest.raises(ValueError, match="its chat template does not write them"):
        Chat(tmp_path / "mute").prompt(CONVERSATION, [WEATHER])
    make_tokenizer(tmp_path / "odd", "{{ tools }}")
    with pytest.raises(ValueError, match="writes calls in a way that is not known here"):
        Chat(tmp_path / "odd").prompt(CONVERSATION, [WEATHER])
    with pytest.raises(ValueError, match="messages is no setting of a request"):
        Chat(folder("qwen")).prompt(CONVERSATION, settings={"messages": []})
    with pytest.raises(ValueError, match="tool 0 must be"):
        Chat(folder("qwen")).prompt(CONVERSATION, [{"name": "weather"}])
    with pytest.raises(ValueError, match="two tools are called 'weather'"):
        Chat(folder("qwen")).prompt(CONVERSATION, [WEATHER, WEATHER])


def test_a_list_of_templates_has_one_for_tools(folder, tmp_path: Path) -> None:
    make_tokenizer(tmp_path, None)
    file = tmp_path / "tokenizer_config.json"
    plain, tools = "{{ messages[0].content }}", "{{ tools | length }}<tool_call>"
    rows = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tools}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": rows}))
    chat = Chat(tmp_path)
    said = [{"role": "user", "content": "hi"}]
    assert chat.prompt(said) == chat.encode("hi")
    assert chat.prompt(said, [WEATHER]) == chat.encode("1<tool_call>")


# ---- text ----


def whole(text: Text | Reading, tokens: list[int]) -> str:
    return "".join(text.add(token) for token in tokens) + text.end()


@pytest.mark.parametrize("said", TEXTS)
def test_text_comes_in_whole_characters_as_soon_as_they_are_there(folder, said: str) -> None:
    tokenizer = Chat(folder("qwen")).tokenizer
    tokens = tokenizer.encode(said).ids
    text, shown, come = Text(tokenizer), "", b""
    for token in tokens:
        shown += text.add(token)
        come += token_bytes(tokenizer, token)
        assert shown == come.decode(errors="ignore")
    assert shown + text.end() == said
    text, parts = Text(tokenizer), pieces(tokenizer, tokens)
    assert "".join(parts) == said
    assert parts == [text.add(token) for token in tokens]
    assert len(tokens) > len(said) or said.isascii()  # characters are spread over tokens


def test_text_in_pieces_is_the_text_of_all_tokens(folder) -> None:
    """Bytes that are no text, too: what a model with random weights writes."""
    tokenizer, draw = Chat(folder("qwen")).tokenizer, random.Random(1)
    ids, added = range(tokenizer.get_vocab_size()), tokenizer.get_added_tokens_decoder()
    special = {token for token, said in added.items() if said.special}
    high = [token for token in ids if token_bytes(tokenizer, token) >= b"\x80"]
    for count in (3, 40, 90):
        for pool in (ids, high):
            tokens = draw.choices(pool, k=count)
            assert whole(Text(tokenizer), tokens) == tokenizer.decode(
                tokens, skip_special_tokens=False
            )
            plain = [token for token in tokens if token not in special]
            assert whole(Reading(tokenizer, []), plain) == tokenizer.decode(plain)
            shown = pieces(tokenizer, tokens)
            assert len(shown) == count
            assert "".join(shown) == tokenizer.decode(tokens, skip_special_tokens=False)


def test_bytes_that_are_no_text_do_not_hold_a_stream_back(folder) -> None:
    tokenizer = Chat(folder("qwen")).tokenizer
    bad = next(t for t in range(400) if token_bytes(tokenizer, t) == b"\xff")
    text = Text(tokenizer)
    found = [text.add(bad) for _ in range(100)]
    assert all(found[4:]) and len("".join(found)) >= 98


def test_bytes_of_a_sentencepiece_tokenizer() -> None:
    vocab = {"<0xE4>": 0, "<0xBD>": 1, "<0xA0>": 2, "▁well": 3, "▁you": 4, "!": 5}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="!"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    text = Text(tokenizer)
    assert [text.add(token) for token in (3, 0, 1, 2, 4, 5)] == ["well", "", "", "你", " you", "!"]
    assert pieces(tokenizer, (3, 0, 1, 2, 4)) == ["well", "", "", "你", " you"]
    assert [token_bytes(tokenizer, t) for t in (0, 3)] == [b"\xe4", b" well"]


def test_special_tokens_are_left_out_but_those_that_mark_calls(folder) -> None:
    tokenizer = Chat(folder("qwen")).tokenizer
    tokens = tokenizer.encode("a<|im_end|>b<|im_start|>c").ids
    kept = frozenset([tokenizer.token_to_id("<|im_start|>")])
    assert whole(Text(tokenizer), tokens) == "a<|im_end|>b<|im_start|>c"
    assert whole(Reading(tokenizer, []), tokens) == "abc"
    assert whole(Reading(tokenizer, [], shown=kept), tokens) == "ab<|im_start|>c"


def cuts(text: str) -> list[list[str]]:
    """A text as one piece, as its characters, and in pieces of three."""
    return [[text], list(text), [text[at : at + 3] for at in range(0, len(text), 3)]]


@pytest.mark.parametrize("pieces", cuts("one END, twEN ENDE three"))
def test_text_ends_before_a_stop_string(pieces: list[str]) -> None:
    stops = Stops(["never", "ENDE"])
    shown = [stops.add(piece) for piece in pieces]
    assert "".join(shown) == "one END, twEN " and stops.found == "ENDE"
    assert stops.end() == ""


def test_only_what_a_stop_string_could_begin_with_is_held_back() -> None:
    stops = Stops(["END", "NO"])
    assert [stops.add(p) for p in ("xE", "N", "x", "END"[:2])] == ["x", "", "ENx", ""]
    assert (stops.end(), stops.found) == ("EN", None)


# ---- calls ----

ZURICH = ToolCall("weather", '{"town": "Zürich"}')
SCHEMAS = {"weather": {"properties": {"town": {"type": "string"}, "days": {"type": "integer"}}}}
XML = (
    "<tool_call>\n<function=weather>\n<parameter=town>\n7\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>"
)
OBJECT = '{"name": "weather", "parameters": {"town": "Zürich"}}'
ARRAY = '[{"name": "weather", "arguments": {"town": "Zürich"}}]'
NAMED = 'weather[ARGS]{"town": "Zürich"}'
HUGE, NO_JSON = '{"name": "f", "arguments": {"x": %s}}', ("1e999", "-1e999", "NaN", '"\\ud800"')
CASES: tuple[tuple[int, str, list[Piece]], ...] = (
    (1, CALL, [ZURICH]),
    (1, f"I look.\n{CALL}\n{CALL}\n", ["I look.", ZURICH, ZURICH]),
    (1, f"{CALL}\n\nDone now. \n", [ZURICH, "Done now. \n"]),
    (1, "No < call <tool here. ", ["No < call <tool here. "]),
    (1, "<tool_call>{broken</tool_call> on", ["<tool_call>{broken</tool_call> on"]),
    (1, '<tool_call>{"name": 3}</tool_call>', ['<tool_call>{"name": 3}</tool_call>']),
    (1, CALL.removesuffix("</tool_call>"), [ZURICH]),  # the end was the token that ended it
    (1, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', [ToolCall("f", "{}")]),
    (0, XML, [ToolCall("weather", '{"town": "7", "days": 3}')]),
    (0, XML.removesuffix("\n</tool_call>"), [ToolCall("weather", '{"town": "7", "days": 3}')]),
    (0, CUT := XML[: XML.index("\n</parameter>")], [CUT]),  # who knows what was to follow
    (0, BARE := "<tool_call>\n<function=weather>", [BARE]),
    (2, f"[TOOL_CALLS]{ARRAY}", [ZURICH]),
    (2, "[TOOL_CALLS][]", ["[TOOL_CALLS][]"]),
    (2, f"[TOOL_CALLS]{NAMED}[TOOL_CALLS]{NAMED}", [ZURICH, ZURICH]),
    (2, "[TOOL_CALLS]none", ["[TOOL_CALLS]none"]),
    (4, OBJECT, [ZURICH]),
    (4, f"<|python_tag|>{OBJECT}; {OBJECT}", [ZURICH, ZURICH]),
    (4, f" \n{OBJECT}\n", [ZURICH]),
    (4, f"Look: {OBJECT} ", [f"Look: {OBJECT} "]),
    (4, '{"a": [1, 2]}', ['{"a": [1, 2]}']),
    (4, "<|pyth", ["<|pyth"]),
    # What JSON can't say again, and no Unicode, are no calls.
    *((1, said, [said]) for said in (f"<tool_call>{HUGE % x}</tool_call>" for x in NO_JSON)),
    *((4, said, [said]) for said in (HUGE % x for x in NO_JSON)),
    (0, XML.replace("3", "1e999"), [ToolCall("weather", '{"town": "7", "days": "1e999"}')]),
)


@pytest.mark.parametrize(("row", "said", "wanted"), CASES)
def test_calls_are_found_however_the_text_is_cut(row: int, said: str, wanted: list[Piece]) -> None:
    for parts in cuts(said):
        reader, found = ToolReader(FORMATS[row], SCHEMAS), list[Piece]()
        for piece in parts:
            found += reader.add(piece)
        found += reader.end()
        texts = "".join(piece for piece in found if isinstance(piece, str))
        assert texts == "".join(piece for piece in wanted if isinstance(piece, str))
        calls = [piece for piece in found if isinstance(piece, ToolCall)]
        assert calls == [piece for piece in wanted if isinstance(piece, ToolCall)]
        assert reader.calls == len(calls)


def test_text_before_a_call_is_not_held_back() -> None:
    reader = ToolReader(FORMATS[1], SCHEMAS)
    assert reader.add("I look <to") == ["I look"]
    assert reader.add("day") == [" <today"]


@pytest.mark.parametrize(
    ("name", "row"), (("qwen", 1), ("mistral", 2), ("harmony", 3), ("llama", 4))
)
def test_a_template_says_how_it_writes_calls(name: str, row: int) -> None:
    assert format_of(TEMPLATES[name]) is FORMATS[row]
    assert format_of("{{ messages }}") is None


SEEN = "<|channel|>analysis<|message|>Rain?<|end|><|start|>assistant"
HEAD = " to=functions.weather<|channel|>commentary <|constrain|>json<|message|>"
LATER = "<|start|>assistant<|channel|>commentary to=functions.weather<|message|>"
CHANNELS: tuple[tuple[str, list[Piece]], ...] = (
    (f"{SEEN}<|channel|>final<|message|>It < rains.", [Thought("Rain?"), "It < rains."]),
    (f'{SEEN}{HEAD}{{"town": "Zürich"}}', [Thought("Rain?"), ZURICH]),  # <|call|> has ended it
    (f'{HEAD}{{"town": "Zürich"}}<|call|>{LATER}{{"town": "Zürich"}}', [ZURICH, ZURICH]),
    (
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{HEAD}"
        '{"town": "Zürich"}',
        ["I look.", ZURICH],
    ),
    (f"{HEAD}rain<|call|>", [f"{HEAD}rain<|call|>"]),
    (f"{HEAD}[1]", [f"{HEAD}[1]"]),
    ("assistants are plain <b>text</b>", ["assistants are plain <b>text</b>"]),
    ("assist", ["assist"]),
    ("<|channel|>analysis", []),  # cut off
    ("", []),
)


@pytest.mark.parametrize(("said", "wanted"), CHANNELS)
def test_channels_are_told_apart_however_the_text_is_cut(said: str, wanted: list[Piece]) -> None:
    for parts in cuts(said):
        reader, found = ChannelReader(FORMATS[3], SCHEMAS, wanted=True), list[Piece]()
        for piece in parts:
            found += reader.add(piece)
        found += reader.end()
        assert joined(found) == wanted, parts
        assert reader.calls == sum(isinstance(piece, ToolCall) for piece in found)


def test_a_final_answer_is_given_out_as_it_comes() -> None:
    reader = ChannelReader(FORMATS[3], SCHEMAS, wanted=False)
    assert reader.add(f"{SEEN}<|channel|>final<|message|>It ra") == [Thought("Rain?"), "It ra"]
    assert reader.add("ins <|en") == ["ins "]
    assert (reader.end(), reader.calls) == (["<|en"], 0)
    reader = ChannelReader(FORMATS[3], SCHEMAS, wanted=False)
    assert reader.add("It ra") == ["It ra"]  # without channels


def test_an_answer_in_channels_is_read_without_tools_too(folder) -> None:
    chat = Chat(folder("harmony"))
    tokens = chat.encode(f"{SEEN}<|channel|>final<|message|>It rains.<|return|>")

    def read(answer: Answer) -> list[Piece]:
        return joined([piece for token in tokens for piece in answer.add(token)] + answer.end())

    assert read(chat.answer([])) == [Thought("Rain?"), "It rains."]
    assert read(chat.answer([], tools=[WEATHER])) == [Thought("Rain?"), "It rains."]
    assert read(chat.answer([], ["ra"])) == [Thought("Rain?"), "It "]
    no_answer = ["analysisRain?assistantfinalIt rains."]
    assert read(chat.continuation([])) == no_answer
    call = chat.encode(f'{SEEN}{HEAD}{{"town": "Zürich"}}')
    tokens = call
    assert read(chat.answer([], tools=[WEATHER])) == [Thought("Rain?"), ZURICH]
    assert read(chat.answer([])) == [Thought("Rain?"), '{"town": "Zürich"}']


def test_thoughts_are_reasoning_content_to_openai_and_nothing_to_anthropic() -> None:
    pieces: list[Piece] = [Thought("Rain?"), "It rains.", ZURICH]
    deltas = [openai_chat._delta(piece, 0)[0] for piece in pieces]
    assert deltas[:2] == [{"reasoning_content": "Rain?"}, {"content": "It rains."}]
    assert deltas[2]["tool_calls"][0]["function"]["name"] == "weather"
    assert anthropic_messages._said(pieces) == pieces[1:]
    past = {"role": "assistant", "content": "It rains.", "reasoning_content": "Rain?"}
    assert openai_chat.template_messages([past]) == [past]
    template = ChatTemplate("{{ messages[0].thinking }}", Path("chat_template.jinja"))
    assert template.render([past]) == "Rain?"  # as gpt-oss's template calls it
    template = ChatTemplate("{{ 'content' in messages[0] }}", Path("chat_template.jinja"))
    assert template.render([{**past, "content": None}]) == "False"  # it would be written as None


def test_an_answer_ends_at_a_stop_string_and_its_call_is_whole(folder) -> None:
    chat = Chat(folder("qwen"))
    answer = chat.answer([], ["STOP"], tools=[WEATHER])
    pieces: list[Piece] = []
    for token in chat.encode(f"So:\n{CALL}\nThen STOP it"):
        pieces += answer.add(token)
    pieces += answer.end()
    at = pieces.index(ZURICH)
    said = ["".join(map(str, part)) for part in (pieces[:at], pieces[at + 1 :])]
    assert said == ["So:", "Then "]
    assert (answer.stopped, answer.calls) == ("STOP", 1)


# ---- the page ----


@pytest.mark.parametrize("module", ("openai_chat", "openai_text", "anthropic_messages"))
def test_the_page_names_every_setting(module: str) -> None:
    tables = importlib.import_module(f"tinsmith.server.inference.{module}")
    page = (ROOT / "docs" / "inference.md").read_text()
    remarks = getattr(tables, "REMARKS", set())
    for kind in ("", "FIREWORKS_"):
        neutral = getattr(tables, f"{kind}NEUTRAL", {})
        single = {name for name, values in neutral.items() if values}
        for name in getattr(tables, f"{kind}SETTINGS", set()) | remarks | single:
            assert f"`{name}`" in page, name
