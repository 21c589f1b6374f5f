"""llama.cpp as a peer: a child process of its own, which runs the same weights from a GGUF file.

The parent's half is Llama, which answers with what the child measured of itself. The child is this
file under an interpreter that has the packages llama-cpp-python and gguf; it needs neither torch
nor tinsmith. It writes the GGUF (qwen3, qwen3moe or qwen35, matrices in the checkpoint's own type;
the parent says the tensors' names), and decodes many sequences in one batch through llama.cpp's C
interface, a context for each number of sequences, all its settings as they come. Commands and
answers are lines of JSON."""

import ctypes
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

EXPERT = re.compile(r"mlp\.experts\.[0-9]+\.(gate|up|down)_proj\.weight")
EXPERT_NUMBER = re.compile(r"\.experts\.([0-9]+)\.")
ROUTER = "ffn_gate_inp.weight"
# The names of a hybrid's tensors that other models do not have, or have otherwise.
HYBRID = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight", "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}  # fmt: skip
SECTIONS = [11, 11, 10, 0]  # of a head's rotary pairs, for text all alike
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


class Llama:
    """The parent's half; RuntimeError with a sentence where the interpreter lacks a package."""

    def __init__(self, python: str, folder: Path, threads: int, clock: str, kind: str = "") -> None:
        command = [python, __file__, str(folder), str(threads), clock, kind]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        is_hybrid = "linear_num_key_heads" in read_config(folder)
        names = {name: gguf_name(name, hybrid=is_hybrid) for name, _, _ in tensors(folder)}
        self.child.stdin.write(json.dumps(names) + "\n")
        self.child.stdin.flush()
        self.version = self._answer()

    def _answer(self) -> Any:
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp's process ended with status {self.child.wait()}")
        answer = json.loads(line)
        if isinstance(answer, dict):
            raise RuntimeError(answer["error"])
        return answer

    def _ask(self, *command: Any) -> Any:
        self.child.stdin.write(json.dumps(command) + "\n")
        self.child.stdin.flush()
        return self._answer()

    def generate(self, prompts: np.ndarray, new: int) -> tuple[float, float, float]:
        """Seconds of the prompts (batch, length), up to the first token's logits; of the tokens
        after it; and what llama.cpp's sampler took to draw those."""
        return tuple(self._ask("generate", prompts.tolist(), new))

    def logprobs(self, tokens: np.ndarray) -> np.ndarray:
        """Log-probability of each token but the first (N - 1)."""
        return np.array(self._ask("logprobs", tokens.tolist()))

    def close(self) -> None:
        """Ends the child."""
        self.child.stdin.close()
        self.child.wait()


def gguf_name(name: str, *, hybrid: bool = False) -> str:
    """llama.cpp's name of one of transformers' tensors."""
    from tinsmith.formats import gguf_model  # which the child does not have

    plain = name.replace("language_model.", "")
    layer, _, rest = plain.removeprefix(gguf_model.LAYERS).partition(".")
    found = HYBRID.get(rest) if hybrid else None
    if expert := EXPERT.fullmatch(rest):
        found = f"ffn_{expert[1]}_exps.weight"
    if rest == "mlp.gate.weight":
        found = "ffn_gate_inp.weight"
    return gguf_model.gguf_name(plain) if found is None else f"blk.{layer}.{found}"


def side(llama: Llama, prompts: Iterator[np.ndarray], new: int) -> Callable[[], tuple]:
    """A call that decodes the next prompts, and what the child measured of it."""
    return lambda: llama.generate(next(prompts), new)


# ---- the GGUF file ----


def read_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    return json.loads((folder / "config.json").read_text())


def tensors(folder: Path) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name, type and bits of each tensor of a checkpoint in one safetensors file."""
    file = folder / "model.safetensors"
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    data = np.memmap(file, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            bits = data[begin:end].view({"F32": np.float32, "BF16": np.uint16}[entry["dtype"]])
            yield name, entry["dtype"], bits.reshape(entry["shape"])


def stacked(
    parts: Iterator[tuple[str, str, np.ndarray]], names: dict[str, str], experts: int
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors under llama.cpp's names, which has a layer's experts in one."""
    found: dict[str, dict[int, np.ndarray]] = {}
    for name, dtype, bits in parts:
        if dtype == "BF16" and (bits.ndim != 2 or 1 in bits.shape or names[name].endswith(ROUTER)):
            bits = (bits.astype(np.uint32) << 16).view(np.float32)
        number = EXPERT_NUMBER.search(name)
        if number is None:
            yield name, bits
            continue
        some = found.setdefault(names[name], {})
        some[int(number[1])] = bits
        if len(some) == experts:
            yield name, np.stack([some[index] for index in range(experts)])
            del found[names[name]]


def hybrid(config: dict[str, Any], name: str, bits: np.ndarray) -> np.ndarray:
    """A tensor of a Qwen3.5 as llama.cpp has it: value heads lie beside those of other key heads,
    norms hold 1 + weight, A is -exp(A_log)."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"]
    rest = name.partition(".linear_attn.")[2].removesuffix(".weight")
    if not rest or rest == "norm":
        return bits + np.float32(1) if name.endswith("norm.weight") and not rest else bits
    if rest == "conv1d":
        bits = bits.reshape(len(bits), -1)
    if rest == "A_log":
        bits = -np.exp(bits)
    each = 1 if rest in ("in_proj_a", "in_proj_b", "A_log", "dt_bias") else width
    heads = np.arange(values).reshape(keys, -1).T.ravel()
    order = (heads[:, None] * each + np.arange(each)).ravel()
    if rest == "out_proj":
        return bits[:, order]
    first = len(bits) - len(order)  # what lies before them is of keys
    return bits[np.concatenate([np.arange(first), first + order])]


def write_gguf(folder: Path, names: dict[str, str], form: str) -> Path:
    """The checkpoint as a GGUF file beside it, its tensors under these names; all but matrices in
    f32, as llama.cpp wants it. `form` is the type of its matrices, "": as they are; the embedding
    is then in Q8_0."""
    import gguf

    config = read_config(folder)
    is_hybrid = "linear_num_key_heads" in config
    file = folder / "model.gguf"
    experts = config.get("num_experts") or config.get("num_local_experts", 0)
    kind = "qwen35" if is_hybrid else "qwen3moe" if experts else "qwen3"
    writer = gguf.GGUFWriter(file, kind)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    if is_hybrid:
        value = config["linear_num_value_heads"] * config["linear_value_head_dim"]
        part = rope.get("partial_rotary_factor", 0.25)
        writer.add_rope_dimension_count(int(config["head_dim"] * part))
        writer.add_rope_dimension_sections(SECTIONS)
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(value)
        writer.add_full_attention_interval(4)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, bits in stacked(tensors(folder), names, experts):
        bits = hybrid(config, name, bits) if is_hybrid else bits
        stored = gguf.GGMLQuantizationType.BF16 if bits.dtype == np.uint16 else None
        raw = np.ascontiguousarray(bits)
        if form and raw.ndim > 1:
            wide = (raw.astype(np.uint32) << 16).view(np.float32) if stored else raw
            stored = gguf.GGMLQuantizationType["Q8_0" if "embed" in name else form]
            raw = gguf.quantize(wide, stored)
        elif stored:
            raw = raw.view(np.uint8)
        writer.add_tensor(names[name], raw, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def mixed_gguf(c: Any, file: Path, form: str, threads: int) -> Path:
    """The file as llama.cpp itself quantises it: a mixture of types, such as Q4_K_M."""
    to = file.with_name(f"model-{form}.gguf")
    params = c.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(c, f"LLAMA_FTYPE_MOSTLY_{form}"), threads
    status = c.llama_model_quantize(bytes(file), bytes(to), ctypes.byref(params))
    if status:
        raise RuntimeError(f"llama_model_quantize returned {status} for {form}")
    return to


# ---- the child: decoding ----


class Engine:
    """The model, and a context of llama.cpp for the number of sequences that was asked last."""

    def __init__(self, file: Path, threads: int, clock: str) -> None:
        import llama_cpp

        self.c, self.threads, self.clock = llama_cpp, threads, CLOCKS[clock]
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), params)
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {file}")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab = llama_cpp.llama_vocab_n_tokens(vocab)
        self.context, self.sizes, self.batch = None, (0, 0), None
        self.sampler = llama_cpp.llama_sampler_chain_init(
            llama_cpp.llama_sampler_chain_default_params()
        )
        llama_cpp.llama_sampler_chain_add(self.sampler, llama_cpp.llama_sampler_init_dist(1))

    def prepare(self, sequences: int, length: int) -> None:
        """A context for so many sequences of at most so many tokens, its cache empty."""
        if self.sizes != (sequences, length):
            if self.context:
                self.c.llama_free(self.context)
                self.c.llama_batch_free(self.batch)
            params = self.c.llama_context_default_params()
            each = -(-length // 256) * 256  # llama.cpp pads a sequence's cache to that
            params.n_ctx, params.n_seq_max = sequences * each, sequences
            params.n_batch = max(sequences * length, 512)
            params.n_threads = params.n_threads_batch = self.threads
            self.context = self.c.llama_init_from_model(self.model, params)
            self.batch = self.c.llama_batch_init(params.n_batch, 0, 1)
            self.sizes = sequences, length
        self.c.llama_memory_clear(self.c.llama_get_memory(self.context), True)

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One batch of (token, position, sequence, whether its logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        status = self.c.llama_decode(self.context, batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")

    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, float, float]:
        """See Llama.generate."""
        count, length = len(prompts), len(prompts[0])
        self.prepare(count, length + new)
        start = self.clock()
        self.decode(
            [
                (token, position, sequence, position + 1 == length)
                for sequence, prompt in enumerate(prompts)
                for position, token in enumerate(prompt)
            ]
        )
        self.c.llama_synchronize(self.context)
        prefill, sampling = self.clock() - start, 0.0
        tokens = self.draw([length * (n + 1) - 1 for n in range(count)])
        start = self.clock()
        for position in range(length, length + new - 1):
            self.decode([(tokens[n], position, n, True) for n in range(count)])
            self.c.llama_synchronize(self.context)
            began = self.clock()
            tokens = self.draw(range(count))
            sampling += self.clock() - began
        return prefill, self.clock() - start - sampling, sampling

    def draw(self, rows: list[int] | range) -> list[int]:
        """A token for each row of the last batch, at temperature 1 from the whole vocabulary."""
        return [self.c.llama_sampler_sample(self.sampler, self.context, row) for row in rows]

    def logprobs(self, tokens: list[int]) -> list[float]:
        """See Llama.logprobs."""
        self.prepare(1, len(tokens))
        self.decode([(token, position, 0, True) for position, token in enumerate(tokens)])
        found = []
        for row, target in enumerate(tokens[1:]):
            pointer = self.c.llama_get_logits_ith(self.context, row)
            logits = np.ctypeslib.as_array(pointer, (self.vocab,)).astype(np.float64)
            top = logits.max()
            found.append(float(logits[target] - top - np.log(np.exp(logits - top).sum())))
        return found


def main() -> None:
    """Answers each line of the standard input with one on the standard output."""
    folder, threads, clock, kind = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    names = json.loads(sys.stdin.readline())
    try:
        import llama_cpp

        quiet = llama_cpp.llama_log_callback(lambda *_: None)  # lives as long as the child
        llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
        mixture = kind.endswith(("_S", "_M", "_L"))
        file = write_gguf(folder, names, "" if mixture else kind)
        if mixture:
            file = mixed_gguf(llama_cpp, file, kind, threads)
        engine = Engine(file, threads, clock)
    except (ImportError, RuntimeError) as error:
        print(json.dumps({"error": f"llama.cpp is absent: {error}"}), flush=True)
        return
    print(json.dumps(f"llama-cpp-python {llama_cpp.__version__}"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
