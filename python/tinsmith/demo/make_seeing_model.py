"""Trains the model of `tinsmith demo --images`, with its tokenizer (a maintainer's script).

    python -m tinsmith.demo.make_seeing_model

needs PyTorch, transformers and Debian's package dataset-fashion-mnist, and took 7 minutes of one
core. The model is a Qwen3.5 with a vision tower, of 1.0 M parameters, 2 MB in bfloat16. One seed,
one number of threads and one version of PyTorch give one model.

It sees the 30,000 training pictures of the five classes in fashion.KNOWN, and none of the other
five. It learns three things at once:

- to name a picture's class. The answer is a sentence, that of the cookbook's vlm_classifier.
- to redraw a picture: a linear map of each image row to the pixels of its quarter of the picture,
  which is then thrown away. Names alone would teach the tower only what tells the five classes
  apart; a tower of a real model has seen more than that.
- to say a word that the question says, without a picture. The words are of many kinds, and the
  other five classes' names are among them, so that the model can spell them as real models can. It
  has never met one of them beside a picture.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5GatedDeltaNet,
    torch_chunk_gated_delta_rule,
)

from tinsmith.demo import data, fashion
from tinsmith.demo.classroom import MODEL, QUESTION, answer_text, prompt_texts
from tinsmith.demo.make_model import IGNORED, edit_json, make_optimizers, train_tokenizer

SOURCE = Path("/usr/share/datasets/fashion-mnist")
VOCABULARY = 384  # an upper limit
SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
MARKERS = (
    "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
SAY = ("Say {word}.", "It is a {word}. What is it?", "What is a {word}? Say it.")
PATCH, MERGE, FRAMES = 16, 2, 2
RESIZED = 2 * MERGE * PATCH  # a picture is 2 × 2 tokens
ROWS = 4
CHUNK = 16
QUARTER = (fashion.SIDE // 2) ** 2
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": PATCH,
    "temporal_patch_size": FRAMES, "merge_size": MERGE,
    "size": {"shortest_edge": RESIZED**2, "longest_edge": 256**2},
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3,
}  # fmt: skip
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.role == 'assistant' %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    "{%- endif %}"
)


def words() -> list[str]:
    """What the model learns to spell: all classes' names, and 160 words of the other demonstration
    and places."""
    return [
        *fashion.NAMES,
        "t shirt",
        *data.split_pools(held_out=False).words,
        *data.all_pools().people,
    ]


def corpus(seed: int) -> Iterator[str]:
    """Texts from which the tokenizer learns its merges."""
    rng = random.Random(f"seeing-corpus-{seed}")
    for _ in range(2000):
        word = rng.choice(words())
        yield "".join(prompt_texts(rng.choice((QUESTION, rng.choice(SAY).format(word=word)))))
        yield answer_text(word)


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """The shipped model's tokenizer."""
    return train_tokenizer(
        corpus(seed), VOCABULARY, SPECIAL, MARKERS, CHAT_TEMPLATE, model_max_length=1024
    )


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3_5Config:
    """The shape of the shipped model."""
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 96, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "max_position_embeddings": 1024,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5,
        },
        "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": ids("<|im_end|>"),
        "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    tower = {
        "depth": 3, "hidden_size": 80, "num_heads": 4, "intermediate_size": 216,
        "num_position_embeddings": 16, "patch_size": PATCH, "spatial_merge_size": MERGE,
        "temporal_patch_size": FRAMES, "out_hidden_size": text["hidden_size"],
    }  # fmt: skip
    return Qwen3_5Config(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
    )


# ---- pictures ----


def patches(pixels: np.ndarray) -> Tensor:
    """Pictures as the image processor hands them to the tower: (16·N, 1536)."""
    grid, side = RESIZED // PATCH, PATCH
    large = [
        Image.fromarray(one).resize((RESIZED,) * 2, Image.Resampling.BICUBIC) for one in pixels
    ]
    x = (np.stack([np.asarray(one) for one in large]).astype(np.float32) / 255 - 0.5) / 0.5
    x = x.reshape(-1, grid // MERGE, MERGE, side, grid // MERGE, MERGE, side)
    x = x.transpose(0, 1, 4, 2, 5, 3, 6).reshape(-1, 1, side * side)
    return torch.from_numpy(np.repeat(x, 3 * FRAMES, 1).reshape(len(x), -1))


def quarters(pixels: np.ndarray) -> Tensor:
    """The pixels of each image row's quarter, from 0 to 1: (4·N, 196)."""
    half = fashion.SIDE // 2
    x = pixels.reshape(-1, 2, half, 2, half).transpose(0, 1, 3, 2, 4).reshape(-1, QUARTER)
    return torch.from_numpy(x.astype(np.float32) / 255)


# ---- training ----


@dataclass(frozen=True)
class PaddedBatch:
    """Sequences of one length, and the patches of their pictures, if they have any."""

    tokens: Tensor
    labels: Tensor
    patches: Tensor | None


class Trainer:
    """The model in training, and what it is trained on."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, source: Path, seed: int):
        self.tokenizer = tokenizer
        self.model = Qwen3_5ForConditionalGeneration(make_config(tokenizer))
        for module in self.model.modules():
            if isinstance(module, Qwen3_5GatedDeltaNet):  # with less work for short sequences
                module.chunk_gated_delta_rule = partial(
                    torch_chunk_gated_delta_rule, chunk_size=CHUNK
                )
        self.decoder = nn.Linear(self.model.config.text_config.hidden_size, QUARTER)
        self.known = fashion.read(fashion.TRAIN, source).of(fashion.KNOWN)
        self.rng = random.Random(f"seeing-{seed}")
        self.pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def batch(
        self, questions: Sequence[str], answers: Sequence[str], seen: Tensor | None
    ) -> PaddedBatch:
        """Questions and their answers, padded on the right; labels are of the next token."""
        rows = []
        for question, answer in zip(questions, answers, strict=True):
            before, after = prompt_texts(question) if seen is not None else text_prompt(question)
            prompt = self.encode(before) + [self.pad] * ROWS * (seen is not None)
            prompt += self.encode(after)
            said = self.encode(answer)
            rows.append((prompt + said, [IGNORED] * len(prompt) + said))
        width = max(len(tokens) for tokens, _ in rows)
        tokens = torch.full((len(rows), width), self.tokenizer.pad_token_id)
        labels = torch.full((len(rows), width), IGNORED)
        for row, (ids, wanted) in enumerate(rows):
            tokens[row, : len(ids)] = torch.tensor(ids)
            labels[row, : len(ids) - 1] = torch.tensor(wanted[1:])
        return PaddedBatch(tokens, labels, seen)

    def loss(self, batch: PaddedBatch) -> tuple[Tensor, Tensor | None]:
        """Mean cross-entropy of the labels, and the image rows."""
        inputs = self.model.get_input_embeddings()(batch.tokens)
        seen, settings = None, {}
        if batch.patches is not None:
            grid = torch.tensor([[1, 2 * MERGE, 2 * MERGE]] * len(inputs))
            tower = self.model.model.get_image_features(batch.patches, grid, return_dict=True)
            seen = torch.cat(tower.pooler_output)
            places = batch.tokens == self.pad
            inputs = inputs.masked_scatter(places[..., None].expand_as(inputs), seen)
            settings["position_ids"], _ = self.model.model.get_rope_index(
                batch.tokens, mm_token_type_ids=places.int(), image_grid_thw=grid
            )
        hidden = self.model.model.language_model(inputs_embeds=inputs, **settings)
        kept = batch.labels != IGNORED
        scores = self.model.lm_head(hidden.last_hidden_state[kept])
        return nn.functional.cross_entropy(scores, batch.labels[kept]), seen

    def seeing_batch(self, count: int) -> tuple[PaddedBatch, np.ndarray]:
        """Pictures to name, half of them turned left to right, and their pixels."""
        some = self.known.take(self.rng.sample(range(len(self.known)), count))
        turn = np.array([self.rng.random() < 0.5 for _ in range(count)])[:, None, None]
        pixels = np.where(turn, some.pixels[:, :, ::-1], some.pixels)
        answers = [answer_text(name) for name in some.names]
        return self.batch([QUESTION] * count, answers, patches(pixels)), pixels

    def saying_batch(self, count: int) -> PaddedBatch:
        """Words to repeat."""
        chosen = [self.rng.choice(words()) for _ in range(count)]
        questions = [self.rng.choice(SAY).format(word=word) for word in chosen]
        return self.batch(questions, [answer_text(word) for word in chosen], None)

    def train(self, steps: int, rate: float) -> None:
        """Warm-up, then a cosine."""
        whole = nn.ModuleList([self.model, self.decoder]).train()
        optimizers = make_optimizers(whole, rate)
        started = time.perf_counter()
        for step in range(steps):
            warm = min(1.0, (step + 1) / 50)
            factor = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["peak"] * factor
            batch, pixels = self.seeing_batch(48)
            named, rows = self.loss(batch)
            redrawn = nn.functional.mse_loss(self.decoder(rows), quarters(pixels))
            (named + 20 * redrawn).backward()
            said, _ = self.loss(self.saying_batch(24))
            said.backward()
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % 50 == 0 or step + 1 == steps:
                seconds = time.perf_counter() - started
                losses = f"named {named:.3f} redrawn {redrawn:.4f} said {said:.3f}"
                print(f"step {step} {losses} {seconds:.0f} s", flush=True)


def text_prompt(question: str) -> tuple[str, str]:
    """A prompt without a picture, in two parts as one with a picture."""
    before, after = prompt_texts(question)
    return before.removesuffix("<|vision_start|>"), after.removeprefix("<|vision_end|>")


def save(
    model: Qwen3_5ForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    """Writes the Hugging Face folder."""
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)  # else only its owner can read the package's copy
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    edit_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    settings = {"do_sample": True, "temperature": 1.0, "eos_token_id": end}
    (folder / "generation_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=MODEL)
    parser.add_argument("--source", type=Path, default=SOURCE, help="Fashion-MNIST's files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    trainer = Trainer(make_tokenizer(args.seed), args.source, args.seed)
    print(f"{trainer.model.num_parameters()} parameters, vocabulary {len(trainer.tokenizer)}")
    trainer.train(args.steps, args.rate)
    save(trainer.model.to(torch.bfloat16), trainer.tokenizer, args.out)


if __name__ == "__main__":
    main()
