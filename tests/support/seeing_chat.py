"""Small random models that see and chat: a Qwen3.5 and a Qwen3-VL with a tokenizer and a chat
template of the form of theirs, and transformers' processor of such a folder."""

import functools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLProcessor

from support.chat_models import MARKS, make_tokenizer
from support.tiny_models import make
from support.vision_models import SEEING

VISION_TOKENS = {
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
}  # fmt: skip
PAD = VISION_TOKENS["image_token_id"]

TEMPLATE = """\
{%- macro write(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nA call: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + write(message.content) }}
        {{- '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + write(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

_ROOT = tempfile.TemporaryDirectory(prefix="tinsmith-seeing-chat-")


@functools.cache
def chat_folder(name: str = "qwen3_5") -> Path:
    """The folder of a model of SEEING that chats, made once."""
    vocab = 400 + len(MARKS) + len(VISION_TOKENS)
    spec = replace(SEEING[name], config={**SEEING[name].config, "vocab_size": vocab})
    folder = make(spec, Path(_ROOT.name) / name)
    make_tokenizer(folder, TEMPLATE)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(list(VISION_TOKENS.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {key: tokenizer.token_to_id(text) for key, text in VISION_TOKENS.items()}
    _change(folder / "config.json", ids)
    _change(folder / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    return folder


def _change(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


class Processor(Qwen3VLProcessor):
    """transformers' own, without the part for videos, which needs torchvision."""

    def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
        return (
            None
            if name == "video_processor"
            else super().check_argument_for_proper_class(name, argument)
        )


def processor_of(folder: Path) -> Processor:
    """transformers' processor of a folder; that of Qwen3.5 is the same."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return Processor(images, tokenizer, None, chat_template=TEMPLATE)
