"""The fields of the SDK's requests, and what is done with each: FIELDS is the table.

Each field is used, ignored (reason in `idle`), or rejected (reason in `refused`). A field of a
newer SDK, which is not in the table, is rejected unless it is empty: no setting is silently
ignored. A test compares the table with the SDK's types.

Types are checked where a field is read (parse.py). msgspec Structs would do the same with 270 more
lines: each field would take a line, and null, the empty fields of newer SDKs, and sentences with
the received value would still need code.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import Message

from tinsmith.checkpoints.optimizers import ADAMW, DIMUON, OPTIMIZERS


@dataclass(frozen=True)
class Fields:
    """A request's fields by what is done with them; `idle` and `refused` give the reasons."""

    read: tuple[str, ...]
    idle: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def known(self) -> list[str]:
        """The fields that are not refused."""
        return sorted({*self.read, *self.idle})


KIND = {"type": "the route says what a request is"}
SESSION = "name a sampling_session_id, which create_sampling_session makes of it"
REPLAY = dict.fromkeys(
    (
        "routing_matrices", "routing_references", "routing_matrix_format",
        "top_sampling_references", "sampling_mask_references",
    ),
    "it replays what another sampler chose; here the sampler's numbers are the trainer's",
)  # fmt: skip
TOKEN = "a checkpoint here is open to every client of this server"

FIELDS: dict[str, Fields] = {
    "sample": Fields(
        (
            "num_samples", "prompt", "sampling_params", "sampling_session_id", "seq_id",
            "prompt_logprobs", "topk_prompt_logprobs", "topk_sample_logprobs",
            "target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n",
            "record_stability_info",
        ),
        idle=KIND,
        refused={"base_model": SESSION, "model_path": SESSION},
    ),
    "sampling_params": Fields(("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")),
    "optim_step": Fields(
        (
            "adam_params", "optimizer_params", "model_id", "seq_id",
            "grad_accumulation_normalization",
        ),
        idle=KIND,
    ),
    "create_model": Fields(
        (
            "session_id", "model_seq_id", "base_model", "user_metadata", "lora_config",
            "optimizer_config", "base_only",
        ),
        idle=KIND,
        refused={"projection_head_dim": "tinsmith trains LoRA, and no head"},
    ),
    "adam_params": Fields((*OPTIMIZERS[ADAMW].settings, "emit_grad_norm_metrics"), idle=KIND),
    "optimizer_params": Fields(("type", *OPTIMIZERS[DIMUON].settings)),
    "optimizer_config": Fields(("type", "version")),
    "lora_config": Fields(
        ("rank", "seed", "train_unembed", "train_mlp", "train_attn", "alpha", "init_method")
    ),
    "load_adapter": Fields(("adapter_path", "model_id", "seq_id")),
    "create_sampling_route": Fields(("base_model", "training_run")),
    "load_weights": Fields(
        (
            "model_id", "seq_id", "session_id", "model_seq_id", "base_model", "user_metadata",
            "path", "optimizer", "optimizer_config",
        ),
        idle=KIND,
        refused={"weights_access_token": TOKEN},
    ),
    "save_weights": Fields(
        ("model_id", "path", "seq_id", "ttl_seconds", "overwrite", "user_metadata"), idle=KIND
    ),
    "save_weights_for_sampler": Fields(
        (
            "model_id", "path", "sampling_session_seq_id", "kind", "seq_id", "ttl_seconds",
            "user_metadata", "checkpoint_type",
        ),
        idle=KIND,
        refused={
            "export_precision": "a checkpoint is an adapter in float32; `tinsmith export` merges",
            "metadata": "it has a place in user_metadata",
        },
    ),
    "save_weights_external": Fields(
        ("model_id", "path", "seq_id", "ttl_seconds", "age_encryption_recipients"), idle=KIND
    ),
    "create_sampling_session": Fields(
        ("session_id", "sampling_session_seq_id", "base_model", "model_path"), idle=KIND
    ),
    # Searches, and uploads of adapters
    "search_checkpoints": Fields(
        ("project_ids", "user_metadata", "checkpoint_type", "owner", "base_models", "limit",
         "cursor")
    ),
    "search_sessions": Fields(
        ("session_id", "project_ids", "user_metadata", "display_name", "owner", "statuses", "limit",
         "cursor")
    ),
    "external_weights_upload_start": Fields(
        ("base_model", "lora_config", "destination_project_id")
    ),
    # Of protobuf messages
    "forward_backward": Fields(
        ("model_id", "seq_id", "data", "loss_fn", "loss_fn_config", "loss_fn_config_v2",
         "forward_only")
    ),
    "image": Fields(
        ("data", "format", "expected_tokens"),
        refused={"override_dimensions": "the model's processor gives an image its size"},
    ),
    "datum": Fields(
        ("model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans")
    ),
    # Of training calls in JSON
    "forward_backward_input": Fields(("forward_backward_input", "model_id", "seq_id"), idle=KIND),
    "forward_input": Fields(("forward_input", "model_id", "seq_id"), idle=KIND),
    "loss_input": Fields(("data", "loss_fn", "loss_fn_config")),
    "json_datum": Fields(("model_input", "loss_fn_inputs")),
    # Of prompts too
    "image_chunk": Fields(("data", "format", "expected_tokens"), idle=KIND),
    "model_input": Fields(("chunks",), refused=REPLAY),
    "tensor": Fields(("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")),
}  # fmt: skip


def check(kind: str, body: Mapping[str, Any], where: str = "") -> None:
    """Raises ValueError if a refused field of a request has a value other than null, false, 0 or
    empty. The sentence calls the request `where`."""
    _refuse(kind, (key for key, value in body.items() if value), where)


def check_message(kind: str, message: Message, where: str = "") -> None:
    """The same for a protobuf message."""
    _refuse(kind, (descriptor.name for descriptor, _ in message.ListFields()), where)


def _refuse(kind: str, came: Iterable[str], where: str = "") -> None:
    fields, where = FIELDS[kind], where or kind
    for key in came:
        if key in fields.refused:
            raise ValueError(f"{where} with {key} is not supported here: {fields.refused[key]}")
        if key not in fields.read and key not in fields.idle:
            raise ValueError(f"unknown field {key!r:.100} in {where}; there are {fields.known}")
