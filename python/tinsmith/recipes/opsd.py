"""On-policy self-distillation (OPSD, arXiv 2601.18734) on a tinsmith server.

    tinsmith run -m tinsmith.recipes.opsd model_name=path/to/Qwen3-1.7B data_path=problems.jsonl

The student answers problems. The teacher is the same model, but has also read the solution; it
gives its own distribution at every token of the answer. The loss is the generalized Jensen-Shannon
divergence of the two distributions over the whole vocabulary, averaged over the answers' tokens.
Samples, divergences and gradients are made by the server (loss_fn="generalized_jsd"); no
distribution leaves it. Everything else is the cookbook's: renderers, logging, checkpoints.
"""

import json
import logging
import math
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook import checkpoint_utils, cli_utils, renderers
from tinker_cookbook.tokenizer_utils import get_tokenizer
from tinker_cookbook.utils import ml_log
from tinker_cookbook.utils.git_rev import recipe_user_metadata

from tinsmith.recipes.opsd_config import (
    Config,
    learning_rate_at,
    loss_config,
    period_of,
    renderer_names,
)
from tinsmith.recipes.opsd_data import (
    Problem,
    batch_of,
    is_correct,
    make_datum,
    pair_of,
    read_problems,
    read_prompts,
)

logger = logging.getLogger(__name__)

LOSS: Any = "generalized_jsd"  # the SDK passes it on, but does not list it
SNAPSHOT_TTL_SECONDS = 604800  # of the teacher's snapshots, like the cookbook's checkpoints


class Recipe:
    """A run: its data, its clients, and what a step does with them. The constructor checks its
    inputs; `connect` starts the work."""

    def __init__(self, config: Config, renderer_name: str):
        self.config, self.renderer_name = config, renderer_name
        self.pairs = read_prompts(config.prompts)
        self.problems = read_problems(config.data_path)
        self.test = read_problems(config.test_path) if config.test_path else []
        self.tokenizer = get_tokenizer(config.model_name)
        self.student, self.teacher = (
            renderers.get_renderer(name, tokenizer=self.tokenizer)
            for name in renderer_names(config, renderer_name)
        )
        self.snapshot: str | None = None  # path of the teacher's weights, if it is periodic

    def connect(self, log_path: str) -> None:
        """Makes the clients, resumed if the log has a checkpoint."""
        self.service = tinker.ServiceClient(
            base_url=self.config.base_url, user_metadata=recipe_user_metadata("recipe_opsd")
        )
        self.start, self.training = self._training_client(self.renderer_name, log_path)
        self.sampler = self._new_sampler()

    def _training_client(self, renderer_name: str, log_path: str) -> tuple[int, Any]:
        """The first step to take, and the client, resumed if the log has a checkpoint."""
        metadata: dict[str, str] = {}
        checkpoint_utils.add_renderer_name_to_user_metadata(metadata, renderer_name)
        last = checkpoint_utils.get_last_checkpoint(log_path)
        if last is not None:
            logger.info("Resuming from %s", last.state_path)
            self.snapshot = last.get("teacher")
            make = self.service.create_training_client_from_state_with_optimizer
            return last.batch or 0, make(last.state_path, user_metadata=metadata).result()
        if self.config.load_checkpoint_path:
            make = self.service.create_training_client_from_state
            path = self.config.load_checkpoint_path
            return 0, make(path, user_metadata=metadata).result()
        make = self.service.create_lora_training_client
        name, rank = self.config.model_name, self.config.lora_rank
        return 0, make(name, rank=rank, user_metadata=metadata).result()

    def _new_sampler(self) -> Any:
        return self.training.save_weights_and_get_sampling_client().result()

    # ---- the teacher ----

    def renew_teacher(self, index: int) -> None:
        """Before step `index`: makes a snapshot of the student the teacher, if one is due. It is
        saved, so that a resumed run has the same teacher."""
        period = period_of(self.config)
        if period and (self.snapshot is None or index % period == 0):
            saved = self.training.save_weights_for_sampler(
                f"teacher-{index:06d}", ttl_seconds=SNAPSHOT_TTL_SECONDS
            )
            self.snapshot = saved.result().path

    def loss_config(self) -> dict[str, float | str]:
        """loss_fn_config, with the current teacher."""
        return loss_config(self.config, self.snapshot if period_of(self.config) else None)

    def state(self, done: int) -> dict[str, Any]:
        """What a checkpoint after `done` steps stores besides the weights."""
        return {"batch": done} | ({"teacher": self.snapshot} if period_of(self.config) else {})

    # ---- answers ----

    def prompts_of(self, row: Problem) -> tuple[list[int], list[int]]:
        """The student's and the teacher's tokens before the answer."""
        texts = pair_of(self.pairs, row, self.config.seed).of(row)
        student, teacher = (
            renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints()
            for renderer, text in zip((self.student, self.teacher), texts, strict=True)
        )
        if self.config.bare_student:
            student = self.tokenizer.encode(texts[0], add_special_tokens=False)
        return student, teacher

    def answers(self, rows: list[Problem], count: int, **params: Any) -> list[list[list[int]]]:
        """`count` answers of the student to each problem, all requested at once."""
        params = tinker.SamplingParams(
            max_tokens=self.config.max_tokens, stop=self.student.get_stop_sequences(), **params
        )
        futures = [
            self.sampler.sample(tinker.ModelInput.from_ints(self.prompts_of(row)[0]), count, params)
            for row in rows
        ]
        return [[list(one.tokens) for one in future.result().sequences] for future in futures]

    def datums(self, rows: list[Problem], answers: list[list[list[int]]]) -> list[tinker.Datum]:
        """The answers with their two prompts; the weights make the loss a mean over tokens."""
        triples = []
        for row, group in zip(rows, answers, strict=True):
            student, teacher = self.prompts_of(row)
            room = self.config.max_context_length - len(teacher)
            triples += [(student, teacher, answer[: max(room, 0)]) for answer in group]
        triples = [triple for triple in triples if triple[2]]
        total = sum(len(answer) for _, _, answer in triples)
        return [make_datum(*triple, weight=1 / total) for triple in triples]

    # ---- steps ----

    def step(self, index: int) -> dict[str, float]:
        """Samples, one step of the optimizer, and a new sampler; returns the metrics."""
        config, start = self.config, time.perf_counter()
        learning_rate = learning_rate_at(config, index)
        rows = batch_of(self.problems, index, config.groups_per_batch, config.seed)
        answers = self.answers(
            rows,
            config.group_size,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
        )
        sampled = time.perf_counter()
        data = self.datums(rows, answers)
        metrics: dict[str, float] = {
            "opsd/num_datums": len(data),
            "opsd/left_out": config.group_size * len(rows) - len(data),
            "optim/lr": learning_rate,
        }
        if data:
            adam = tinker.AdamParams(
                learning_rate=learning_rate,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                grad_clip_norm=config.grad_clip_norm,
            )
            future = self.training.forward_backward(data, LOSS, self.loss_config())
            optim = self.training.optim_step(adam)
            metrics |= future.result().metrics
            metrics |= optim.result().metrics or {}
            self.sampler = self._new_sampler()
        metrics |= {"time/sample": sampled - start, "time/train": time.perf_counter() - sampled}
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Greedy answers to the held-out problems: how many are right, and how far they are from
        the teacher."""
        if not self.test:
            return {}
        answers = self.answers(self.test, 1, temperature=0.0)
        texts = [
            self.tokenizer.decode(group[0], skip_special_tokens=True).strip() for group in answers
        ]
        right = [is_correct(text, row) for text, row in zip(texts, self.test, strict=True)]
        metrics = {"test/correct": sum(right) / len(right)}
        data = self.datums(self.test, answers)
        if data:
            scored = self.training.forward(data, LOSS, self.loss_config()).result()
            metrics["test/jsd"] = scored.metrics["loss:sum"]
        return metrics


def run(config: Config) -> None:
    """The whole recipe."""
    renderer_name = checkpoint_utils.resolve_renderer_name_from_checkpoint_or_default(
        model_name=config.model_name,
        explicit_renderer_name=config.renderer_name,
        load_checkpoint_path=config.load_checkpoint_path,
        base_url=config.base_url,
    )
    recipe = Recipe(config, renderer_name)
    log_path = str(Path(config.log_path or default_log_path(config)).expanduser())
    cli_utils.check_log_dir(log_path, behavior_if_exists=config.behavior_if_log_dir_exists)
    ml_logger = ml_log.setup_logging(
        log_dir=log_path,
        wandb_project=config.wandb_project,
        wandb_name=config.wandb_name or Path(log_path).name,
        config=config,
    )
    recipe.connect(log_path)
    drop_metrics(Path(log_path) / "metrics.jsonl", recipe.start)
    manager = checkpoint_utils.CheckpointManager(
        training_client=recipe.training,
        service_client=recipe.service,
        log_path=log_path,
        save_every=config.save_every,
        store=ml_logger.store,
    )
    for index in range(recipe.start, config.max_steps):
        metrics: dict[str, float] = {"progress/batch": index}
        recipe.renew_teacher(index)
        if config.eval_every > 0 and index % config.eval_every == 0:
            metrics |= recipe.evaluate()
        metrics |= recipe.step(index)
        metrics["progress/done_frac"] = (index + 1) / config.max_steps
        if index + 1 < config.max_steps:
            manager.maybe_save(index + 1, recipe.state(index + 1))
        elif config.eval_every > 0:
            metrics |= {f"final/{key}": value for key, value in recipe.evaluate().items()}
        ml_logger.log_metrics(metrics, step=index)
    if recipe.start < config.max_steps:
        manager.save_final(recipe.state(config.max_steps))
    ml_logger.close()


def drop_metrics(path: Path, start: int) -> None:
    """Removes the rows of step `start` and later from metrics.jsonl: a run that was interrupted
    after its last checkpoint repeats those steps, and its log should have each once."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    kept = [line for line in lines if _step_of(line) < start]
    if len(kept) < len(lines):
        beside = path.with_name(path.name + "~part")
        beside.write_bytes(b"".join(line + b"\n" for line in kept))
        beside.replace(path)


def _step_of(line: bytes) -> float:
    try:
        row = json.loads(line)
    except ValueError:
        return math.inf  # truncated at the end of the run
    return float(row.get("step", -math.inf))


def default_log_path(config: Config) -> str:
    """A folder in the cookbook's folder of logs, named after the run."""
    model = config.model_name.strip("/").replace("/", "-")
    teacher = re.sub(r"\W+", "-", config.teacher)
    moment = datetime.now().strftime("%Y-%m-%d-%H-%M")
    return cli_utils.runs_path("opsd", f"opsd-{model}-{teacher}-beta{config.beta}-{moment}")


if __name__ == "__main__":
    run(chz.entrypoint(Config))
