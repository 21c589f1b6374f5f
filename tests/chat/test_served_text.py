"""What is trained on is what is served: each API reads and writes the same text of the same ids.

The models here are tables: the token that follows a token is chosen, so every answer is known.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import tinker
import tinsmith
import torch
from conftest import make_datum
from support import tokenizer_folders as folders
from tinker_cookbook import renderers
from tinsmith.chat.chat import Chat
from tinsmith.cli import chat_command
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

ASKED = [{"role": "user", "content": "hi"}]
# Qwen3.5's way with thoughts, and with parts.
THINKING = folders.PARTS.replace("{{- '<|im_end|>\\n' }}", "{{- '<|im_end|>\\n' }}")


def chain(folder: Path, made: Tokenizer, follows: Mapping[int, int], **settings: Any) -> Path:
    """A model after whose token i the token follows[i] is by far the likeliest."""
    vocab = made.get_vocab_size()
    width = -(-vocab // 8) * 8
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=256,
        tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab, width))
        head = torch.randn(vocab, width) * 0.02
        for before, behind in follows.items():
            head[behind, before] = 12 / width**0.5
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    made.save(str(folder / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


class Served:
    """A folder's model behind every API. Each method returns a greedy answer's text and the stop
    string that the API says has ended it."""

    def __init__(self, folder: Path, backend: Backend):
        self.folder, self.backend = folder, backend
        self.openai = openai.OpenAI(base_url=f"{backend.url}/v1", api_key="x", max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=backend.url, api_key="x", max_retries=0)

    def completion(self, prompt: str, stream: bool = False, **more: Any) -> tuple[str, Any, Any]:
        given = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        if not stream:
            choice = self.openai.completions.create(**given).choices[0]
            return choice.text, choice.finish_reason, choice.model_dump()["stop_reason"]
        chunks = [c.choices[0] for c in self.openai.completions.create(stream=True, **given)]
        text = "".join(chunk.text for chunk in chunks)
        return text, chunks[-1].finish_reason, chunks[-1].model_dump()["stop_reason"]

    def chat(self, stream: bool = False, **more: Any) -> tuple[str, Any, Any]:
        given = {"model": "m", "messages": ASKED, "max_tokens": 8, "temperature": 0, **more}
        if not stream:
            choice = self.openai.chat.completions.create(**given).choices[0]
            return choice.message.content, choice.finish_reason, choice.model_dump()["stop_reason"]
        chunks = [c.choices[0] for c in self.openai.chat.completions.create(stream=True, **given)]
        text = "".join(chunk.delta.content or "" for chunk in chunks)
        return text, chunks[-1].finish_reason, chunks[-1].model_dump()["stop_reason"]

    def message(self, stops: list[str] | None = None) -> tuple[str, Any, Any]:
        more = {"stop_sequences": stops} if stops else {}
        found = self.anthropic.messages.create(
            model="m", messages=ASKED, max_tokens=8, extra_body={"temperature": 0}, **more
        )
        text = "".join(block.text for block in found.content)
        return text, found.stop_reason, found.stop_sequence

    def sdk(self, prompt: list[int], **params: Any) -> tuple[list[int], str]:
        with self.backend.service_client() as client:
            sampler = client.create_sampling_client(base_model="m")
            given = tinker.SamplingParams(max_tokens=8, temperature=0, **params)
            [found] = (
                sampler.sample(tinker.ModelInput.from_ints(prompt), 1, given).result().sequences
            )
        return list(found.tokens), found.stop_reason


def serve(folder: Path) -> Iterator[Served]:
    with Backend(
        ServerConfig({"m": folder}, checkpoints=folder.with_name("saved"), device="cpu", threads=1)
    ) as backend:
        yield Served(folder, backend)


@pytest.fixture(scope="module")
def capital(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """▁is ▁the ▁time . </s>, with a SentencePiece tokenizer."""
    made = folders.sentencepiece()
    ids = [made.token_to_id(text) for text in ("▁is", "▁the", "▁time", ".", "</s>")]
    follows = dict(pairwise(ids))
    root = tmp_path_factory.mktemp("capital")
    yield from serve(chain(root / "m", made, follows, **folders.SPM_NAMES))


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """\\n A B <|im_end|> \\n: a base model whose own end is another token, <|endoftext|>."""
    made = folders.byte_level()
    ids = [*(made.encode(text).ids[0] for text in "\nAB"), made.token_to_id("<|im_end|>")]
    follows = dict(zip(ids, [*ids[1:], ids[0]], strict=True))
    settings = {"eos_token": "<|endoftext|>", "chat_template": folders.CHATML}
    yield from serve(chain(tmp_path_factory.mktemp("turns") / "m", made, follows, **settings))


# ---- one text ----


@pytest.mark.parametrize("stream", (False, True))
def test_a_completion_keeps_its_first_space(capital, stream: bool) -> None:
    prompt, whole = "time is", "time is the time."
    assert capital.completion(prompt, stream) == (whole[len(prompt) :], "stop", None)
    found = capital.completion(prompt, stream, stop=[" the"])
    assert found == ("", "stop", " the")  # seen at the first token, with nothing behind it
    assert capital.completion(prompt, stream, stop=["me", "zz"]) == (" the ti", "stop", "me")


def test_the_tokens_of_logprobs_say_the_text(capital) -> None:
    given = {"model": "m", "prompt": "time is", "max_tokens": 8, "temperature": 0, "logprobs": 1}
    [choice] = capital.openai.completions.create(**given).choices
    assert "".join(choice.logprobs.tokens) == choice.text == " the time."


def test_a_rollout_ends_at_a_stop_string_of_its_first_token(capital) -> None:
    prompt = Chat(capital.folder).encode("time is", special=True)
    the = Chat(capital.folder).tokenizer.token_to_id("▁the")
    assert capital.sdk(prompt, stop=[" the"]) == ([the], "stop")
    with tinsmith.Model(capital.folder, device="cpu") as model:
        draw = model.sampler().sample
        [found] = draw("time is", max_tokens=8, temperature=0, stop=[" the"])
        assert (found.tokens.tolist(), found.text, found.stop) == ([the], "", " the")
        [found] = draw("time is", max_tokens=8, temperature=0)
        assert (found.text, found.stop) == (" the time.", model.eos_ids[0])
        [found] = draw("time is", max_tokens=2, temperature=0)
        assert (found.text, found.stop) == (" the time", None)


@pytest.mark.parametrize("stop", ("<|im_end|>", "B<|im", "A"))
def test_a_stop_string_may_be_in_special_tokens(turns, stop: str) -> None:
    """All but the SDK, which has ids alone, leave it out of the text and name it."""
    wanted = "AB<|im_end|>"[: "AB<|im_end|>".index(stop)]
    for stream in (False, True):
        assert turns.completion("\n", stream, stop=stop) == (wanted, "stop", stop)
        assert turns.chat(stream, stop=[stop]) == (wanted, "stop", stop)
    assert turns.message([stop]) == (wanted, "stop_sequence", stop)
    chat = Chat(turns.folder)
    tokens = chat.encode("AB<|im_end|>")[: 1 if stop == "A" else 3]
    assert turns.sdk(chat.encode("\n"), stop=[stop]) == (tokens, "stop")
    with tinsmith.Model(turns.folder, device="cpu") as model:
        [found] = model.sampler().sample("\n", max_tokens=8, temperature=0, stop=stop)
        assert (found.text, found.stop) == (wanted, stop)
        answer = model.chat("hi", max_tokens=8, temperature=0, stop=stop)
        assert (answer.text, answer.message["content"], answer.stop) == (wanted, wanted, stop)


# ---- where a turn ends ----


def test_a_chat_ends_where_its_template_ends_a_turn(turns) -> None:
    for stream in (False, True):
        assert turns.chat(stream) == ("AB", "stop", None)
    assert turns.message() == ("AB", "end_turn", None)
    with tinsmith.Model(turns.folder, device="cpu") as model:
        answer = model.chat("hi", max_tokens=8, temperature=0)
        assert (answer.text, answer.stop_reason) == ("AB", "stop")
        assert answer.stop == Chat(turns.folder).tokenizer.token_to_id("<|im_end|>")
        told: list[str] = []
        speaker = chat_command.Speaker(model)
        chat_command.Conversation(
            speaker, chat_command.ChatSettings(temperature=0), told.append
        ).say("hi")
        assert "".join(told) == "AB\n"
    # A text goes on: it is no turn.
    assert turns.completion("\n") == ("AB\nAB\n"[:6], "length", None)


# Phi-3's: where no answer is asked for, the whole ends with a token of its own.
PHI = (
    "{% for m in messages %}{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
EACH = "{%% for m in messages %%}{{ m.content }}%s{%% endfor %%}"


@pytest.mark.parametrize(
    ("template", "wanted"),
    (
        (folders.CHATML, ["<|im_end|>"]),
        (folders.PARTS, ["<|im_end|>"]),
        (EACH % "</think>", []),  # a mark within answers, which is no control token
        (EACH % "</think><|im_end|>", ["<|im_end|>"]),
        (EACH % "<|end|>\n{% if loop.last %}<|endoftext|>{% endif %}", ["<|end|>"]),
        (PHI, ["<|end|>"]),
        (EACH % "{% if not loop.last %}<|im_end|>\n<|im_start|>{% endif %}", ["<|im_end|>"]),
        (EACH % "<|end|><|message|><|channel|>", []),  # of a channel, not of a turn
        (
            EACH % "<|im_end|><|end|>" + "{% if add_generation_prompt %}<|end|>{% endif %}",
            ["<|im_end|>"],
        ),  # the last one begins answers
        (EACH % "END", []),  # it is no token
        (EACH % "", []),
        ("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}", []),  # unknown
        (folders.PARTS.replace("{{- c }}", ""), ["<|im_end|>"]),  # it takes nothing but parts
        (EACH % "<|im_end|>\n<|im_start|>", []),  # one is the model's own
        ("{{ raise_exception('no') }}", []),
        (None, []),
    ),
)
def test_a_turn_ends_with_the_token_that_the_template_writes(
    template: str | None, wanted: list[str], tmp_path: Path
) -> None:
    made = folders.with_added(folders.byte_level(), "</think>", "<|end|>")
    made.save(str(tmp_path / "tokenizer.json"))
    said = {} if template is None else {"chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    own = (made.token_to_id("<|endoftext|>"), made.token_to_id("<|im_start|>"))
    assert Chat(tmp_path).ends(own) == (*own, *map(made.token_to_id, wanted))


def test_a_space_that_the_template_writes_is_not_the_answers(tmp_path: Path) -> None:
    """So the next prompt has the ids that were drawn."""
    made = folders.sentencepiece()
    ids = [made.token_to_id(text) for text in ("S", "▁the", "▁time", "</s>")]
    settings = {**folders.SPM_NAMES, "chat_template": folders.LLAMA.replace("[/INST]", "INS")}
    folder = chain(tmp_path / "m", made, dict(pairwise(ids)), **settings)
    for served in serve(folder):
        for stream in (False, True):
            assert served.chat(stream) == ("the time", "stop", None)
        assert served.message() == ("the time", "end_turn", None)
    with tinsmith.Model(folder, device="cpu") as model:
        answer = model.chat("hi", max_tokens=8, temperature=0)
        assert answer.text == answer.message["content"] == "the time"
        again = model.tokenizer.apply_chat_template([*ASKED, answer.message])
        assert again == [*answer.prompt, *answer.tokens]


# ---- parts ----

STRICT = "{% for m in messages %}{{ m.content + '|' }}{% endfor %}"
LISTED = "{% for m in messages %}{{ m.content | string + '|' }}{% endfor %}"
USERS = (
    "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}|"
    "{% endfor %}"
)
TWO = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("template", "wanted"),
    (
        (folders.PARTS, "<|im_start|>{role}\none two<|im_end|>\n"),
        (STRICT, "one \ntwo|"),
        (LISTED, "one \ntwo|"),
    ),
)
@pytest.mark.parametrize("role", ("system", "user", "assistant", "tool"))
def test_parts_go_to_templates_that_walk_over_them(
    template: str, wanted: str, role: str, tmp_path: Path
) -> None:
    folders.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)
    said = Chat(tmp_path).text([{"role": role, "content": TWO}], answer=False)
    assert said == wanted.format(role=role)


def test_a_template_may_walk_over_one_roles_parts(tmp_path: Path) -> None:
    folders.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(USERS)
    said = [{"role": role, "content": TWO} for role in ("system", "user")]
    assert Chat(tmp_path).text(said, answer=False) == "one \ntwo|one two|"


def test_a_role_that_can_not_be_asked_about_is_as_the_users(tmp_path: Path) -> None:
    """A conversation has to end with the user's words, or a tool's be no answer to another call."""
    folders.byte_level().save(str(tmp_path / "tokenizer.json"))
    last = "{% if messages[-1].role != 'user' %}{{ raise_exception('whose turn?') }}{% endif %}"
    (tmp_path / "chat_template.jinja").write_text(last + folders.PARTS)
    said = [{"role": role, "content": TWO} for role in ("user", "assistant", "tool", "user")]
    text = Chat(tmp_path).text(said, answer=False)
    assert text.count("one two") == 4


@pytest.mark.parametrize("part", ({"type": "image", "image": "a.png"}, {"type": "text"}, "one"))
def test_a_part_that_is_no_text_is_refused(part: Any, tmp_path: Path) -> None:
    folders.byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(folders.PARTS)
    with pytest.raises(ValueError, match=r"messages\[0\] has the part"):
        Chat(tmp_path).text([{"role": "user", "content": [part]}])


def test_parts_reach_the_template_through_each_api(tmp_path: Path, monkeypatch) -> None:
    said: list[Any] = []
    made = folders.byte_level()
    folder = chain(tmp_path / "m", made, {}, eos_token="<|im_end|>", chat_template=folders.PARTS)
    text = Chat.text

    def heard(self: Chat, *given: Any, **more: Any) -> str:
        said.append(text(self, *given, **more))
        return said[-1]

    monkeypatch.setattr(Chat, "text", heard)
    asked = [{"role": "user", "content": TWO}]
    for served in serve(folder):
        given = {"model": "m", "messages": asked, "max_tokens": 1}
        served.openai.chat.completions.create(**given)
        served.anthropic.messages.create(**given)
        served.anthropic.messages.create(**given, system=TWO)
    with tinsmith.Model(folder, device="cpu") as model:
        model.chat(asked, max_tokens=1)
    users = "<|im_start|>user\none two<|im_end|>\n<|im_start|>assistant\n<think>\n"
    system = "<|im_start|>system\none two<|im_end|>\n"
    assert said == [users, users, system + users, users]


# ---- a folder like Qwen3.5's ----


def test_a_run_is_served_the_ids_that_it_was_trained_on(tmp_path: Path, monkeypatch) -> None:
    """The cookbook's renderer reads the folder with AutoTokenizer; tokens that end turns are in
    tokenizer_config.json alone."""
    n = folders.N
    made = folders.qwen(special=("<|endoftext|>",))
    settings = {
        "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": folders.PARTS,
        "added_tokens_decoder": folders.decoder(n - 3, *folders.ENDS)
        | folders.decoder(n, *folders.THINK, special=False),
    }  # fmt: skip
    wide = folders.with_added(folders.qwen(), *folders.THINK)  # the model has a row for each
    folder = chain(tmp_path / "m", wide, {}, **settings)
    made.save(str(folder / "tokenizer.json"))
    renderer = renderers.get_renderer("qwen3_5", AutoTokenizer.from_pretrained(folder))
    question = {"role": "user", "content": "What time is it in 北京?"}
    prompt = renderer.build_generation_prompt([question]).to_ints()
    said = renderer.tokenizer.encode("It is late.\n</think>\n\nIt is 3.<|im_end|>")
    datum = make_datum(
        [*prompt, *said][:-1],
        [*prompt, *said][1:],
        weights=[0.0] * (len(prompt) - 1) + [1.0] * len(said),
    )
    asked: list[list[int]] = []
    for served in serve(folder):
        worker = served.backend._service.worker
        sample = worker.sample

        def heard(session: Any, request: Any, *more: Any, sample: Any = sample) -> Any:
            asked.append(request.prompt.tolist())
            return sample(session, request, *more)

        monkeypatch.setattr(worker, "sample", heard)
        with served.backend.service_client() as client:
            trainer = client.create_lora_training_client("m", rank=16, seed=1).result()
            for _ in range(60):
                trainer.forward_backward([datum], "cross_entropy")
                trainer.optim_step(tinker.AdamParams(learning_rate=4e-3)).result()
            path = trainer.save_weights_for_sampler("a").result().path
        given = {"model": path, "messages": [question], "max_tokens": 60, "temperature": 0}
        [choice] = served.openai.chat.completions.create(**given).choices
    print("trained", prompt, "\nserved ", asked[0])
    assert asked == [prompt]
    assert choice.message.content == "It is late.\n</think>\n\nIt is 3."
    assert choice.finish_reason == "stop"
    assert renderer.get_stop_sequences() == [said[-1]]
