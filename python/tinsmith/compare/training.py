"""One training through the Tinker SDK: batches of questions, forward_backward, optim_step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tinker

from tinsmith.compare.data import Record
from tinsmith.compare.methods import METHODS, Judge, Student, Value, seed_of
from tinsmith.compare.plan import Plan, PlannedRun
from tinsmith.compare.prompts import Prompts
from tinsmith.recipes.opsd_data import batch_of

BETAS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}  # the cookbook's


@dataclass(frozen=True)
class Trained:
    """The result of a training: the student's sampler, its tinker:// path, and a row of metrics for
    each step."""

    sampler: tinker.SamplingClient
    path: str
    steps: list[dict[str, Any]]


def train(
    service: tinker.ServiceClient,
    plan: Plan,
    run: PlannedRun,
    prompts: Prompts,
    records: Sequence[Record],
    judge: Judge,
    tell: Callable[[int], None] = lambda step: None,
) -> Trained:
    """Trains a new adapter for a run; calls `tell` with the number of finished steps.

    Everything random follows from the run's seed: the adapter, the batches, the answers.

        train(service, plan, Run("sft", 1e-4, 0), prompts, records, judge).path
    """
    method, settings = METHODS[run.method], plan.methods[run.method]
    rate, seed = float(run.learning_rate or 0), int(run.seed or 0)
    training = service.create_lora_training_client(
        plan.model, rank=plan.rank, seed=seed_of("adapter", seed), user_metadata={"name": run.told}
    ).result()
    base = service.create_sampling_client(base_model=plan.model).result()
    sampler, steps = base, []
    for step in range(plan.steps):
        began = time.perf_counter()
        if method.on_policy and step:  # the first answers are the base model's: B is 0
            sampler = training.save_weights_and_get_sampling_client().result()
        draw = f"{seed}/{step}"
        student = Student(sampler, base, prompts, plan.max_tokens, plan.context, judge, draw)
        picked = batch_of(records, step, plan.batch, seed)
        steps.append({"step": step} | _step(training, student, method, settings, picked, rate))
        steps[-1]["seconds"] = round(time.perf_counter() - began, 3)
        tell(step + 1)
    saved = training.save_weights_for_sampler("final").result()
    return Trained(
        service.create_sampling_client(model_path=saved.path).result(), saved.path, steps
    )


def _step(
    training: tinker.TrainingClient,
    student: Student,
    method: Any,
    settings: dict[str, Value],
    records: Sequence[Record],
    rate: float,
) -> dict[str, Any]:
    """Does a step and returns its metrics; without datums nothing is trained."""
    batch = method.batch(student, settings, records)
    if not batch.data:
        return {"datums": 0}
    adam = tinker.AdamParams(learning_rate=rate, grad_clip_norm=batch.grad_clip_norm, **BETAS)
    forward = training.forward_backward(batch.data, batch.loss_fn, batch.loss_fn_config)
    optim = training.optim_step(adam)
    metrics = forward.result().metrics | (optim.result().metrics or {})
    return {"datums": len(batch.data)} | metrics
