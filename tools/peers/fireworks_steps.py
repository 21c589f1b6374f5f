"""What Fireworks' training SDK can do with a server, step by step, with only its base_url changed.

    pip install 'fireworks-ai[training]==1.2.30'       # torch first, where there is no GPU
    tinsmith serve --model tiny=FOLDER --port 8000
    python tools/peers/fireworks_steps.py http://127.0.0.1:8000 tiny

Each step is a call and a check of its answer. A step that needs an earlier one which failed fails
too. REFUSED are steps that a local server must refuse, with a word of the sentence that is wanted.
Prints a line for each step, and the count.
"""

import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from fireworks.training.sdk import FiretitanServiceClient, FireworksClient
from fireworks.training.sdk.client import GradAccNormalization, GradNormMetricsMode

try:
    from fireworks.training.sdk import types
except ImportError:  # before 1.2.25 the types are Tinker's
    from tinker import types

KEY = "fw-local"
TOKENS = [11, 12, 13, 14, 15]
TARGETS = [12, 13, 14, 15, 16]
WEIGHTS = [0.0, 1.0, 1.0, 0.5, 1.0]
ADAM = types.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01)
Step = Callable[["Loop"], Any]
STEPS: dict[str, Step] = {}
REFUSED: dict[str, tuple[str, Step]] = {}


def step(name: str) -> Callable[[Step], Step]:
    """Adds a step."""

    def add(function: Step) -> Step:
        STEPS[name] = function
        return function

    return add


def refused(name: str, word: str) -> Callable[[Step], Step]:
    """Adds a step that must be refused."""

    def add(function: Step) -> Step:
        REFUSED[name] = (word, function)
        return function

    return add


def tensor(values: list[Any], dtype: str = "float32") -> types.TensorData:
    return types.TensorData(data=values, dtype=dtype, shape=[len(values)])


def datum(**inputs: types.TensorData) -> types.Datum:
    source = types.ModelInput.from_ints(TOKENS)
    return types.Datum(
        model_input=source, loss_fn_inputs={"target_tokens": tensor(TARGETS, "int64"), **inputs}
    )


def weighted() -> types.Datum:
    return datum(weights=tensor(WEIGHTS))


class Loop:
    """The clients of the steps, and what later steps need of earlier ones."""

    def __init__(self, url: str, model: str):
        self.url, self.model = url, model
        self.service = FiretitanServiceClient(base_url=url, api_key=KEY)
        self.numbers: list[float] = []
        self.client: Any = None
        self.other: Any = None
        self.base: Any = None
        self.serverless: Any = None
        self.run: Any = None
        self.sampler: Any = None
        self.sampled: Any = None
        self.paths: dict[str, str] = {}

    def forward(self, client: Any) -> list[float]:
        """The log-probabilities of one datum."""
        found = client.forward([weighted()], "cross_entropy").result()
        return list(found.loss_fn_outputs[0]["logprobs"].data)

    def policy(self) -> types.Datum:
        """For the policy losses."""
        old = tensor([value - 0.1 for value in self.numbers])
        return datum(logprobs=old, advantages=tensor([1.0, -1.0, 0.5, 0.0, 2.0]))


def check(fits: bool, what: Any = "") -> None:
    if not fits:
        raise AssertionError(f"another answer: {what}")


# ---- a service and a run ----


@step("get_server_capabilities")
def _(loop: Loop) -> None:
    names = [one.model_name for one in loop.service.get_server_capabilities().supported_models]
    check(loop.model in names, names)


@step("create_training_client with its defaults (alpha 32)")
def _(loop: Loop) -> None:
    loop.client = loop.service.create_training_client(loop.model, lora_rank=4, seed=1)


@step("create_lora_training_client, alpha 16, kaiming")
def _(loop: Loop) -> None:
    loop.other = loop.service.create_lora_training_client(
        loop.model, rank=2, seed=2, alpha=16, init_method="kaiming", train_mlp=False
    )


@step("create_lora_training_client, alpha None")
def _(loop: Loop) -> None:
    loop.service.create_lora_training_client(loop.model, rank=3, alpha=None).unload_model().result()


@step("create_base_training_client (the reference)")
def _(loop: Loop) -> None:
    loop.base = loop.service.create_base_training_client(loop.model)


@step("forward of the reference: the base model's numbers")
def _(loop: Loop) -> None:
    check(loop.forward(loop.base) == loop.forward(loop.client))


@step("get_info")
def _(loop: Loop) -> None:
    check(loop.client.get_info().lora_rank == 4)


# ---- losses ----


@step("forward, cross_entropy")
def _(loop: Loop) -> None:
    loop.numbers = loop.forward(loop.client)
    check(len(loop.numbers) == 5 and all(value < 0 for value in loop.numbers))


@step("forward_backward, cross_entropy: a sum")
def _(loop: Loop) -> None:
    found = loop.client.forward_backward([weighted()], "cross_entropy").result()
    wanted = -sum(w * value for w, value in zip(WEIGHTS, loop.numbers, strict=True))
    check(math.isclose(found.metrics["loss:sum"], wanted, rel_tol=1e-5), found.metrics)
    check(found.metrics["response_tokens"] > 0)


@step("optim_step with AdamParams")
def _(loop: Loop) -> None:
    check(loop.client.optim_step(ADAM).result().metrics["grad_norm"] > 0)


def _builtin(loss: str, config: dict[str, Any] | None = None) -> Step:
    def run(loop: Loop) -> None:
        loop.numbers = loop.forward(loop.client)
        found = loop.client.forward_backward([loop.policy()], loss, config).result()
        check(math.isfinite(found.metrics["loss:sum"]))
        loop.client.optim_step(ADAM).result()

    return run


for _name in ("importance_sampling", "ppo", "cispo", "gspo", "dapo", "dppo"):
    STEPS[f"forward_backward, {_name}"] = _builtin(_name)
STEPS["forward_backward, dro"] = _builtin("dro", {"beta": 0.1})
STEPS["forward_backward, ppo with thresholds"] = _builtin(
    "ppo", {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4}
)


def _custom(loop: Loop, loss: Any, count: int = 1) -> dict[str, float]:
    found = loop.client.forward_backward_custom([weighted() for _ in range(count)], loss).result()
    return found.metrics


def _cross_entropy(data: Any, logprobs: Any) -> Any:
    total = torch.zeros(())
    for one, row in zip(data, logprobs, strict=True):
        weights = torch.tensor(one.loss_fn_inputs["weights"].data)
        total = total - torch.dot(row.float(), weights)
    return total / len(logprobs), {"nll": (total / len(logprobs)).item()}


@step("forward_backward_custom, cross-entropy")
def _(loop: Loop) -> None:
    check(_custom(loop, _cross_entropy)["nll"] > 0)


@step("forward_backward_custom, GRPO with a KL term")
def _(loop: Loop) -> None:
    reference = torch.tensor(loop.forward(loop.base))

    def loss(data: Any, logprobs: Any) -> Any:
        weights = torch.tensor(data[0].loss_fn_inputs["weights"].data)
        total = -0.7 * torch.dot(logprobs[0].float(), weights)
        total = total + 0.001 * torch.dot(logprobs[0].float() - reference, weights)
        return total, {"loss": total.item()}

    check(math.isfinite(_custom(loop, loss)["loss"]))


@step("forward_backward_custom, DPO's margin")
def _(loop: Loop) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        weights = torch.tensor(data[0].loss_fn_inputs["weights"].data)
        margin = torch.dot(logprobs[0].float(), weights) - torch.dot(logprobs[1].float(), -weights)
        return -torch.nn.functional.logsigmoid(0.1 * margin), {"margin": margin.item()}

    check(math.isfinite(_custom(loop, loss, 2)["margin"]))


@step("forward_backward_custom, precomputed_forward")
def _(loop: Loop) -> None:
    data = [weighted()]
    before = loop.client.forward(data, "cross_entropy").result()
    found = loop.client.forward_backward_custom(data, _cross_entropy, precomputed_forward=before)
    check(found.result().metrics["nll"] > 0)


# ---- accumulation, and its normalisation ----


def _normalised(mode: Any) -> Step:
    def run(loop: Loop) -> None:
        for _ in range(2):
            loop.client.forward_backward([weighted()], "cross_entropy").result()
        found = loop.client.optim_step(ADAM, grad_accumulation_normalization=mode).result()
        check(found.metrics["grad_norm"] > 0)

    return run


for _mode in ("num_loss_tokens", "num_sequences", "none", None, GradAccNormalization.NONE):
    STEPS[f"accumulation, normalisation {_mode!r}"] = _normalised(_mode)


def _metrics(mode: Any) -> Step:
    def run(loop: Loop) -> None:
        loop.client.forward_backward([weighted()], "cross_entropy").result()
        loop.client.optim_step(ADAM, emit_grad_norm_metrics=mode).result()

    return run


for _kind in (False, True, GradNormMetricsMode.OFF, GradNormMetricsMode.BASIC):
    STEPS[f"optim_step, emit_grad_norm_metrics {_kind!r}"] = _metrics(_kind)


# ---- checkpoints ----


@step("save_state")
def _(loop: Loop) -> None:
    loop.paths["state"] = loop.client.save_state("step-1").result().path
    loop.numbers = loop.forward(loop.client)


@step("list_checkpoints")
def _(loop: Loop) -> None:
    check("step-1" in loop.client.list_checkpoints())


def _loads(how: str, name: str) -> Step:
    def run(loop: Loop) -> None:
        loop.client.forward_backward([weighted()], "cross_entropy").result()
        loop.client.optim_step(ADAM).result()
        check(loop.forward(loop.client) != loop.numbers)
        getattr(loop.client, how)(loop.paths.get(name, name)).result()
        check(loop.forward(loop.client) == loop.numbers)

    return run


for _how in ("load_state", "load_state_with_optimizer"):
    STEPS[f"{_how} of what save_state returned"] = _loads(_how, "state")
    STEPS[f"{_how} of a bare name"] = _loads(_how, "step-1")


@step("resolve_checkpoint_path, then load_state")
def _(loop: Loop) -> None:
    path = loop.client.resolve_checkpoint_path("step-1")
    loop.client.load_state(path).result()
    check(loop.forward(loop.client) == loop.numbers)


@step("load_state of cross_job://")
def _(loop: Loop) -> None:
    run = loop.paths["state"].split("/")[1]
    path = loop.client.resolve_checkpoint_path("step-1", source_job_id=run)
    loop.client.load_state(path).result()
    check(loop.forward(loop.client) == loop.numbers)


@step("save_weights_for_sampler")
def _(loop: Loop) -> None:
    loop.paths["sampler"] = loop.client.save_weights_for_sampler("sampler-1").result().path


@step("save_weights_for_sampler_ext, base")
def _(loop: Loop) -> None:
    found = loop.client.save_weights_for_sampler_ext("sampler-2", checkpoint_type="base")
    check(found.snapshot_name.startswith("sampler-2"))


@step("load_adapter of a sampler checkpoint")
def _(loop: Loop) -> None:
    loop.client.load_adapter(loop.paths["sampler"]).result()
    check(loop.forward(loop.client) == loop.numbers)


@step("load_state of another run's checkpoint in a second service")
def _(loop: Loop) -> None:
    second = FiretitanServiceClient(base_url=loop.url, api_key=KEY)
    client = second.create_lora_training_client(loop.model, rank=4)
    client.load_state(loop.paths["state"]).result()
    check(loop.forward(client) == loop.numbers)
    second.close()


# ---- the serverless way: GRPO, and its resume ----


class Plain:
    """A tokenizer is asked for; these steps send ids."""

    eos_token_id = 2

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) % 64 for letter in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


@step("serverless: a session and a run")
def _(loop: Loop) -> None:
    service = FiretitanServiceClient(base_url=f"{loop.url}/training/v1/serverless", api_key=KEY)
    loop.serverless = service
    loop.run = service.create_lora_training_client(loop.model, rank=4, seed=1)
    check(loop.run.run_id.startswith("run-") and service.training_session_id.startswith("ts-"))


@step("serverless: session and run have names in the account")
def _(loop: Loop) -> None:
    check(loop.serverless.training_session_name.startswith("accounts/local/trainingSessions/ts-"))
    check(loop.run.run_name.startswith("accounts/local/trainingRuns/run-"))


def _sample(loop: Loop, count: int = 2) -> Any:
    path = loop.run.save_weights_for_sampler(f"rollout-{len(loop.paths)}").result().path
    loop.paths[path] = path
    loop.sampler = loop.serverless.create_sampling_client(model_path=path, tokenizer=Plain())
    params = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3)
    return loop.sampler.sample(types.ModelInput.from_ints(TOKENS), count, params).result()


@step("serverless: create_sampling_client, and sample")
def _(loop: Loop) -> None:
    loop.sampled = _sample(loop)
    check(len(loop.sampled.sequences) == 2)
    check(all(len(one.tokens) == len(one.logprobs) for one in loop.sampled.sequences))


@step("serverless: the sampler's numbers are the trainer's")
def _(loop: Loop) -> None:
    [one] = loop.sampled.sequences[:1]
    drawn = list(one.tokens)
    ids = [*TOKENS, *drawn]
    target = tensor(ids[1:], "int64")
    source = types.ModelInput.from_ints(ids[:-1])
    row = types.Datum(model_input=source, loss_fn_inputs={"target_tokens": target})
    found = loop.run.forward([row], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    check(list(found[-len(drawn) :]) == list(one.logprobs), "the numbers differ")


@step("serverless: prompt log-probabilities with a sample")
def _(loop: Loop) -> None:
    params = types.SamplingParams(max_tokens=2, temperature=1.0, seed=3)
    prompt = types.ModelInput.from_ints(TOKENS)
    found = loop.sampler.sample(prompt, 1, params, include_prompt_logprobs=True).result()
    check(found.prompt_logprobs[0] is None and len(found.prompt_logprobs) == len(TOKENS))


@step("serverless: GRPO steps with num_loss_tokens")
def _(loop: Loop) -> None:
    for _ in range(2):
        rows = []
        for sign, one in zip((1.0, -1.0), _sample(loop).sequences, strict=True):
            drawn, behind = list(one.tokens), len(TOKENS) - 1
            ids = [*TOKENS, *drawn]
            rows.append(
                types.Datum(
                    model_input=types.ModelInput.from_ints(ids[:-1]),
                    loss_fn_inputs={
                        "target_tokens": tensor([0] * behind + drawn, "int64"),
                        "logprobs": tensor([0.0] * behind + list(one.logprobs)),
                        "advantages": tensor([0.0] * behind + [sign] * len(drawn)),
                    },
                )
            )
        loop.run.forward_backward(rows, "importance_sampling").result()
        loop.run.optim_step(ADAM, GradAccNormalization.NUM_LOSS_TOKENS).result()


@step("serverless: the base model's compute_logprobs (a KL reference)")
def _(loop: Loop) -> None:
    base = loop.serverless.create_sampling_client(base_model=loop.model, tokenizer=Plain())
    prompt = types.ModelInput.from_ints([*TOKENS, TARGETS[-1]])
    found = base.compute_logprobs(prompt).result()
    check([None, *loop.forward(loop.base)] == list(found), found)


@step("serverless: save_state")
def _(loop: Loop) -> None:
    loop.numbers = loop.forward(loop.run)
    loop.paths["resume"] = loop.run.save_state("resume-1").result().path


@step("serverless: get_weights_info")
def _(loop: Loop) -> None:
    rest = loop.serverless.create_rest_client()
    check(rest.get_weights_info_by_tinker_path(loop.paths["resume"]).result().lora_rank == 4)


@step("serverless: create_training_client_from_state in a second service")
def _(loop: Loop) -> None:
    second = FiretitanServiceClient(base_url=f"{loop.url}/training/v1/serverless", api_key=KEY)
    client = second.create_training_client_from_state(loop.paths["resume"])
    check(loop.forward(client) == loop.numbers)
    second.delete_training_session()


@step("serverless: a run that is resumed with its optimizer goes on bit for bit")
def _(loop: Loop) -> None:
    second = FiretitanServiceClient(base_url=f"{loop.url}/training/v1/serverless", api_key=KEY)
    client = second.create_training_client_from_state_with_optimizer(loop.paths["resume"])
    for one in (client, loop.run):
        one.forward_backward([weighted()], "cross_entropy").result()
        one.optim_step(ADAM).result()
    check(loop.forward(client) == loop.forward(loop.run) != loop.numbers)
    second.delete_training_session()


@step("serverless: sampling a checkpoint of another service")
def _(loop: Loop) -> None:
    second = FiretitanServiceClient(base_url=f"{loop.url}/training/v1/serverless", api_key=KEY)
    path = next(name for name in loop.paths if name.startswith("local/"))
    client = second.create_sampling_client(model_path=path, tokenizer=Plain())
    params = types.SamplingParams(max_tokens=2, seed=1)
    check(client.sample(types.ModelInput.from_ints(TOKENS), 1, params).result().sequences)


@step("serverless: the control plane lists a session's checkpoints")
def _(loop: Loop) -> None:
    with FireworksClient(api_key=KEY, base_url=loop.url) as control:
        rows = control.list_training_session_checkpoints(loop.serverless.training_session_name)
    kinds = {row["checkpointType"] for row in rows}
    check(kinds == {"TRAINING_LORA", "INFERENCE_LORA"}, rows)


@step("unload_model")
def _(loop: Loop) -> None:
    loop.other.unload_model().result()


@step("close")
def _(loop: Loop) -> None:
    loop.service.close()


# ---- what must be refused, at once and with a sentence ----


def _fresh(loop: Loop) -> Any:
    service = FiretitanServiceClient(base_url=loop.url, api_key=KEY)
    return service, service.create_lora_training_client(loop.model, rank=1)


@refused("full parameters (lora_rank=0)", "LoRA")
def _(loop: Loop) -> None:
    FiretitanServiceClient(base_url=loop.url, api_key=KEY).create_training_client(loop.model)


@refused("init_method nora", "kaiming")
def _(loop: Loop) -> None:
    service = FiretitanServiceClient(base_url=loop.url, api_key=KEY)
    service.create_lora_training_client(loop.model, rank=2, init_method="nora")


@refused("projection_head_dim", "projection_head_dim")
def _(loop: Loop) -> None:
    service = FiretitanServiceClient(base_url=loop.url, api_key=KEY)
    service.create_lora_training_client(loop.model, rank=2, projection_head_dim=8)


@refused("emit_grad_norm_metrics detailed", "emit_grad_norm_metrics")
def _(loop: Loop) -> None:
    _fresh(loop)[1].optim_step(ADAM, emit_grad_norm_metrics="detailed").result()


@refused("checkpoint_type merged_base", "checkpoint_type")
def _(loop: Loop) -> None:
    _fresh(loop)[1].save_weights_for_sampler_ext("x", checkpoint_type="merged_base")


@refused("router replay", "routing_matrices")
def _(loop: Loop) -> None:
    source = types.ModelInput.from_ints(TOKENS, routing_matrices=["AA=="] * 5)
    inputs = {"target_tokens": tensor(TARGETS, "int64")}
    row = types.Datum(model_input=source, loss_fn_inputs=inputs)
    _fresh(loop)[1].forward_backward([row], "cross_entropy").result()


@refused("weight-based datums and the built-in loss (as the seed page says)", "target_tokens")
def _(loop: Loop) -> None:
    source = types.ModelInput.from_ints(TOKENS)
    row = types.Datum(model_input=source, loss_fn_inputs={"weights": tensor(WEIGHTS)})
    _fresh(loop)[1].forward_backward([row], "cross_entropy").result()


@refused("a gradient of the reference", "forward only")
def _(loop: Loop) -> None:
    service = FiretitanServiceClient(base_url=loop.url, api_key=KEY)
    base = service.create_base_training_client(loop.model)
    base.forward_backward([weighted()], "cross_entropy").result()


@refused("provisioning: a training shape", "provisioning")
def _(loop: Loop) -> None:
    with FireworksClient(api_key=KEY, base_url=loop.url) as control:
        control.resolve_training_profile("accounts/fireworks/trainingShapes/ts-x")


@refused("promotion of a checkpoint", "provisioning")
def _(loop: Loop) -> None:
    with FireworksClient(api_key=KEY, base_url=loop.url) as control:
        name = f"{loop.serverless.training_session_name}/checkpoints/x"
        control.promote_session_checkpoint(name, "mine", loop.model)


def main(url: str, model: str) -> int:
    """The table of all steps; 1 where one is not as it should be."""
    warnings.simplefilter("ignore")
    loop, right, well = Loop(url, model), 0, 0
    for name, function in STEPS.items():
        try:
            function(loop)
            right += 1
            print(f"ok       {name}", flush=True)
        except Exception as error:
            print(f"FAILED   {name}: {type(error).__name__}: {error!s:.300}", flush=True)
    for name, (word, function) in REFUSED.items():
        try:
            function(loop)
            print(f"TAKEN    {name}", flush=True)
        except Exception as error:
            fits = word in str(error)
            well += fits
            print(f"{'refused ' if fits else 'UNCLEAR '} {name}: {error!s:.300}", flush=True)
    print(
        f"result: {right} of {len(STEPS)} steps, {well} of {len(REFUSED)} refused as they should be"
    )
    return int(right < len(STEPS) or well < len(REFUSED))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
