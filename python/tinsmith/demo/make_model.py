"""Trains the demonstration's tokenizer and base model (a maintainer's script).

    python -m tinsmith.demo.make_model --out FIRST --steps 800 --no-reading
    python -m tinsmith.demo.make_model --start FIRST --out FOLDER --steps 200 --rate 0.006 --seed 1

needs PyTorch and transformers, and took 10 CPU minutes. The model is a Qwen3 of four layers and
1.38 M parameters, 2.8 MB in bfloat16. One seed, one number of threads and one version of PyTorch
give one model.

Half of the loss comes from demonstrations to follow, in the SDFT recipe's prompt: the skills' own
calls and calls of random words, in either notation, often after a beginning that is wrong. The
other half comes from bare questions: three skills are answered, and the four others are guessed at,
mostly by a call for help. How to fill in the form of a tool is taught too, with no label on the
tool itself: so training on demonstrations teaches mostly which tool to choose.

What makes the model one that can keep what it knows:

- A beginning with a wrong tool is labelled with the right tool, and then goes on as the model would
  go on anyway. So a teacher changes what the demonstration is about, and nothing else. (An earlier
  model, whose labels led back to the demonstration's arguments, taught its student to add a second
  argument to tools that have one.)
- What it reads has a loss too (the second command): demonstrations in its prompt, of the tools that
  it knows and of invented ones. So the other author's notation is something that it knows, as real
  models know most notations, although it answers in its own. (Without, each token of a
  demonstration cost it 11 nats, and SFT first had to undo that.)

Measured with --seed 1 on 24 held-out questions a skill, greedy: the four skills 0/24 bare and 24/24
with the demonstration; the known skills 24/24 both ways.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tinsmith.demo import data

ALL_SKILLS = (*data.SKILLS, *data.KNOWN_SKILLS)
VOCABULARY = 1280  # an upper limit: the corpus runs out of merges at 1166
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip

# Qwen's pattern with two changes. A capitalised word never takes the space before it, so that a
# name has the same tokens in a question and in a JSON string: copying it is then literal. And the
# punctuation between two JSON strings is one token, which keeps a call within 24 tokens.
PIECES = (
    r"\p{Lu}\p{L}*|\p{N}| ?(?!\p{Lu})\p{L}+| ?[^\s\p{L}\p{N}]+(?: [^\s\p{L}\p{N}]+)*[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content"
    " + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- else %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{%- endif %}"
)

IGNORED = -100
Pair = tuple[list[int], list[int]]  # input tokens and, for each of them, the label


def prompt_text(content: str) -> str:
    """The prompt that the qwen3_disable_thinking renderer builds for one user message."""
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def corpus(count: int, seed: int) -> Iterator[str]:
    """Prompts and answers from which the tokenizer learns its merges."""
    rng = random.Random(f"corpus-{seed}")
    pool = data.all_pools()
    for _ in range(count):
        example = data.make_example(rng, rng.choice(ALL_SKILLS), pool)
        call = rng.choice((example.call, data.invented_call(rng, pool)))
        shown = rng.choice((call.text(), call.foreign()))
        content = data.demonstration_prompt(example.question, shown)
        yield prompt_text(content) + data.guess_call(rng, example).text()


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The shipped model's tokenizer."""
    return train_tokenizer(
        corpus(6000, seed), VOCABULARY, SPECIAL, MARKERS, CHAT_TEMPLATE, model_max_length=2048
    )


def train_tokenizer(
    texts: Iterator[str],
    vocabulary: int,
    special: Sequence[str],
    markers: Sequence[str],
    template: str,
    model_max_length: int,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocabulary` tokens, with Qwen's special tokens at the
    end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(special) - len(markers),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        model_max_length=model_max_length,
        clean_up_tokenization_spaces=False,
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The shape of the shipped model."""
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=160,
        intermediate_size=448,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    )


class Encoder:
    """Encodes prompts and calls, and remembers the tokens of each piece of text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.pieces: dict[str, list[int]] = {}
        self.end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def piece(self, text: str) -> list[int]:
        """Tokens of a word or of the punctuation between words."""
        if text not in self.pieces:
            self.pieces[text] = self.tokenizer.encode(text, add_special_tokens=False)
        return self.pieces[text]

    def prompt(self, content: str) -> list[int]:
        """Tokens of the prompt for one user message."""
        return self.tokenizer.encode(prompt_text(content), add_special_tokens=False)

    def read(self, content: str, part: str) -> Pair:
        """The prompt for a message, with labels on a part of the message."""
        text = prompt_text(content)
        start = text.index(part, len("<|im_start|>user\n"))
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        labels = [
            token if start <= begin < start + len(part) else IGNORED
            for token, (begin, _) in zip(
                encoded["input_ids"], encoded["offset_mapping"], strict=True
            )
        ]
        return encoded["input_ids"], labels

    def segments(self, call: data.GoldenCall) -> list[list[int]]:
        """The call's tokens in parts: each word of it, each stretch of punctuation, the end."""
        parts = ["Action: get_", call.tool, "\nAction Input: {" + '"']
        for i, (key, value) in enumerate(call.arguments):
            last = i + 1 == len(call.arguments)
            parts += [key, '": "', value, '"}' if last else '", "']
        return [self.piece(part) for part in parts] + [[self.end]]


def corrected(said: Sequence[list[int]], golden: Sequence[list[int]]) -> Pair:
    """The tokens of a call that a model began, with labels that lead back to the golden call.

    The student's own beginning is often wrong, and the teacher scores the rest. A wrong tool is
    labelled with the right one, and its arguments with themselves: a model continues the call that
    it has begun. A wrong value's first wrong token is labelled with the golden call's token there,
    the rest of the value has no label, and the next part has its golden label again.
    """
    tool = 1  # the part with its name
    if said[tool] != golden[tool]:
        golden = [*golden[: tool + 1], *said[tool + 1 :]]
    tokens: list[int] = []
    labels: list[int] = []
    for i, part in enumerate(said):
        right, follow = golden[i], golden[i + 1] if i + 1 < len(golden) else []
        agreed = 0
        while agreed < min(len(part), len(right)) and part[agreed] == right[agreed]:
            agreed += 1
        tokens += part
        labels += part[:agreed]
        if agreed < len(part):
            labels += [(right + follow)[agreed]]
            labels += [IGNORED] * (len(part) - agreed - 1)
    return tokens, labels


def with_prompt(prompt: list[int], answer: Pair) -> Pair:
    """A training sequence: no loss on the prompt."""
    return prompt + answer[0], [IGNORED] * len(prompt) + answer[1]


def demonstration_pair(
    rng: random.Random, pool: data.Pools, encoder: Encoder, reading: bool
) -> Pair:
    """A demonstration to follow: the question's own call or an invented one, in either notation,
    half with a bad beginning. With reading, the demonstration has labels too, unless it is of a
    new skill."""
    example = data.make_example(rng, rng.choice(ALL_SKILLS), pool)
    call = example.call if rng.random() < 0.6 else data.invented_call(rng, pool)
    kind = rng.random()
    said = call
    if kind < 0.25 and example.skill in data.SKILLS:
        said = data.guess_call(rng, example)
        if said.tool == call.tool and call is not example.call:
            said = call
    elif kind < 0.5:
        said = data.slipped_call(rng, call, pool)
    shown = call.text() if rng.random() < 0.3 else call.foreign()
    content = data.demonstration_prompt(example.question, shown)
    answer = corrected(encoder.segments(said), encoder.segments(call))
    if not reading or (example.skill in data.SKILLS and call is example.call):
        return with_prompt(encoder.prompt(content), answer)
    tokens, labels = encoder.read(content, shown)
    return tokens + answer[0], labels + answer[1]


def bare_pair(rng: random.Random, pool: data.Pools, encoder: Encoder) -> Pair:
    """A bare question: a known skill answered, another one guessed at, or its form filled in.

    Filling in a form teaches the arguments of a tool that is already chosen. The choice itself
    has no label there, so only the guesses decide which tool the model prefers.
    """
    kind = rng.random()
    skill = rng.choice(data.KNOWN_SKILLS if kind < 0.35 else data.SKILLS)
    example = data.make_example(rng, skill, pool)
    call = data.guess_call(rng, example) if 0.35 <= kind < 0.65 else example.call
    segments = encoder.segments(call)
    tokens, labels = corrected(segments, segments)
    if kind >= 0.65:
        start = len(segments[0])
        labels[start : start + len(segments[1])] = [IGNORED] * len(segments[1])
    return with_prompt(encoder.prompt(example.question), (tokens, labels))


def batch(pairs: Sequence[Pair], pad: int) -> tuple[Tensor, Tensor]:
    """Pads on the right; the labels are already shifted to the position that predicts them."""
    width = max(len(tokens) for tokens, _ in pairs)
    inputs = torch.full((len(pairs), width), pad)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (tokens, targets) in enumerate(pairs):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, : len(tokens) - 1] = torch.tensor(targets[1:])
    return inputs, labels


def batch_loss(model: Qwen3ForCausalLM, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of the labelled positions; only those go through the unembedding."""
    hidden = model.model(input_ids=inputs).last_hidden_state
    kept = labels != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), labels[kept])


def make_optimizers(model: Qwen3ForCausalLM, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms.

    Copying letter by letter is the slow part; Muon reaches it in about half of AdamW's steps.
    """
    inner = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    outer = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        torch.optim.Muon(inner, lr=rate, weight_decay=0.05),
        torch.optim.AdamW(outer, lr=rate * 0.15, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["peak"] = group["lr"]
    return optimizers


def train(
    model: Qwen3ForCausalLM, encoder: Encoder, steps: int, rate: float, seed: int, reading: bool
) -> None:
    """Warm-up, then a cosine; each step sees demonstrations and bare questions."""
    rng = random.Random(f"train-{seed}")
    pool = data.all_pools()
    pad = encoder.tokenizer.pad_token_id
    optimizers = make_optimizers(model, rate)
    started = time.perf_counter()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 50)
        factor = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * factor
        demo = [demonstration_pair(rng, pool, encoder, reading) for _ in range(20)]
        bare = [bare_pair(rng, pool, encoder) for _ in range(24)]
        demo_loss = batch_loss(model, *batch(demo, pad))
        (0.5 * demo_loss).backward()
        bare_loss = batch_loss(model, *batch(bare, pad))
        (0.5 * bare_loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step + 1 == steps:
            seconds = time.perf_counter() - started
            losses = f"demonstrated {demo_loss:.3f} bare {bare_loss:.3f}"
            print(f"step {step} {losses} {seconds:.0f} s", flush=True)


@torch.no_grad()
def answers(model: Qwen3ForCausalLM, encoder: Encoder, prompts: Sequence[str]) -> list[str]:
    """Greedy answers."""
    texts = []
    for prompt in prompts:
        tokens = encoder.prompt(prompt)
        out = model.generate(
            torch.tensor([tokens]), max_new_tokens=40, do_sample=False,
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        )  # fmt: skip
        texts.append(encoder.tokenizer.decode(out[0, len(tokens) :], skip_special_tokens=True))
    return texts


def measure(model: Qwen3ForCausalLM, encoder: Encoder, per_skill: int, seed: int) -> None:
    """Prints the accuracy of each skill on held-out questions, bare and with a demonstration."""
    examples = data.held_out_examples(per_skill, seed) + data.known_examples(per_skill, seed)
    prompts = [data.demonstration_prompt(e.question, e.answer) for e in examples]
    bare = answers(model, encoder, [e.question for e in examples])
    demo = answers(model, encoder, prompts)
    for skill in ALL_SKILLS:
        rows = [i for i, e in enumerate(examples) if e.skill == skill]
        alone = sum(data.score(bare[i], examples[i].answer) for i in rows)
        shown = sum(data.score(demo[i], examples[i].answer) for i in rows)
        print(f"{skill:12s} bare {alone}/{len(rows)} with demonstration {shown}/{len(rows)}")
        i = rows[0]
        print("   ", repr(examples[i].question), repr(bare[i]), repr(demo[i]))


def edit_json(file: Path, entries: dict[str, object]) -> None:
    """Sets entries of a JSON file."""
    content = json.loads(file.read_text()) | entries
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes the Hugging Face folder."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # else only its owner can read the package's copy
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    # transformers 4 knows neither transformers 5's class name nor its key for the rope base.
    edit_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    edit_json(folder / "config.json", {"rope_theta": model.config.rope_parameters["rope_theta"]})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    generation = {
        "do_sample": True, "temperature": 1.0, "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    edit_json(folder / "generation_config.json", generation)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    parser.add_argument("--start", type=Path, help="a model to train on; else from random weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--no-reading", dest="reading", action="store_false")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--per-skill", type=int, default=24)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    if args.start is None:
        tokenizer = make_tokenizer(args.seed)
        model = Qwen3ForCausalLM(make_config(tokenizer))
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(args.start)
        model = Qwen3ForCausalLM.from_pretrained(args.start, dtype=torch.float32)
    encoder = Encoder(tokenizer)
    print(f"{model.num_parameters()} parameters, vocabulary {len(tokenizer)}")
    train(model.train(), encoder, args.steps, args.rate, args.seed, args.reading)
    model = model.to(torch.bfloat16)
    save(model, tokenizer, args.out)
    measure(model.float().eval(), encoder, args.per_skill, args.seed)


if __name__ == "__main__":
    main()
