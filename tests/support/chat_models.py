"""Small models with chat templates of the common kinds, for the tests of conversations.

The templates are short ones of our own that write tools, calls and results as the templates of
Qwen, Llama and Mistral do.
"""

import json
from pathlib import Path
from typing import Any

CONTEXT = 1024
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHANNELS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>",
)  # fmt: skip
MARKS = ("<tool_call>", "</tool_call>")  # tokens that are not special, as Qwen has them

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>\\nA call: <tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call>' }}
    {{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('a system message comes first') }}{%- endif %}
        {%- continue %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if tools is not none %}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}
    {% endfor %}
    {{- '{"name": function name, "parameters": dictionary of argument name and its value}' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
MISTRAL = """\
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- if tools is defined and tools and loop.last %}
            {{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls %}
        {{- '[TOOL_CALLS]' }}{% generation %}{{ message.tool_calls | tojson }}{% endgeneration %}
    {%- else %}
        {{- message.content }}
    {%- endif %}
{%- endfor %}
"""
HARMONY = """\
{%- if tools %}
    {{- '<|start|>developer<|message|># Tools' }}
    {%- for tool in tools %}{{- '\\n// ' + (tool.function.parameters | tojson) }}{%- endfor %}
    {{- '<|end|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- for call in message.tool_calls or [] %}
            {{- '<|start|>assistant to=functions.' + call.function.name }}
            {{- '<|channel|>commentary <|constrain|>json<|message|>' }}
            {{- call.function.arguments | tojson + '<|call|>' }}
        {%- else %}
            {{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|start|>functions.' + message.name + ' to=assistant<|channel|>commentary' }}
        {{- '<|message|>' + message.content + '<|end|>' }}
    {%- else %}
        {{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
TEMPLATES = {"qwen": QWEN, "llama": LLAMA, "mistral": MISTRAL, "harmony": HARMONY}

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town < 1 day & more.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Zürich"}}\n</tool_call>'
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Weather in Zürich?  "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "weather", "arguments": {"town": "Zürich"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Thanks. 你好 😀"},
]


def make_tokenizer(folder: Path, template: str | None, *, as_file: bool = False) -> None:
    """A byte-level BPE tokenizer with a chat template, in tokenizer_config.json or its own file."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([QWEN, CALL, json.dumps(WEATHER)], trainer)
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    if template is HARMONY:
        tokenizer.add_special_tokens(list(CHANNELS))
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<|endoftext|>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
    }
    if template is not None and as_file:
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def make_model(folder: Path, template: str | None = QWEN) -> Path:
    """A Qwen3 of two layers with random weights, which speaks through a template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    make_tokenizer(folder, template)
    config = Qwen3Config(
        vocab_size=400 + len(MARKS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder
