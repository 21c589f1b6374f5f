"""On-policy self-distillation (OPSD, arXiv 2601.18734) on a tinsmith server.

    tinsmith run -m tinsmith.recipes.opsd model_name=path/to/Qwen3-1.7B data_path=problems.jsonl

The student answers problems. The teacher is the same model, but has also read the solution; it
gives its own distribution at every token of the answer. The loss is the generalized Jensen-Shannon
divergence of the two distributions over the whole vocabulary, averaged over the answers' tokens.
Samples, divergences and gradients are made by the server (loss_fn="generalized_jsd"); no
distribution leaves it. Everything else is the cookbook's: renderers, logging, checkpoints.
"""

import logging
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

from tinsmith.recipes.opsd_data import (
    PROMPTS,
    Problem,
    batch_of,
    is_correct,
    make_datum,
    read_problems,
)

logger = logging.getLogger(__name__)

LOSS: Any = "generalized_jsd"  # which the SDK passes on, but does not list
TEACHERS = {"fixed": "base", "ema": "ema", "current": "current"}


@chz.chz
class Config:
    """The command line, key=value."""

    # Model
    model_name: str
    renderer_name: str | None = None
    lora_rank: int = 64
    load_checkpoint_path: str | None = None

    # Data: JSONL with the columns problem and solution
    data_path: str
    test_path: str | None = None
    prompts: str = "math"  # math | demonstration
    bare_student: bool = False  # the student's prompt without the renderer's template
    seed: int = 0

    # Sampling
    groups_per_batch: int = 32
    group_size: int = 1
    max_tokens: int = 1024
    temperature: float = 1.1
    top_p: float = 0.95
    top_k: int = 20
    max_context_length: int = 32768  # of the teacher; longer answers are cut, for both

    # Loss
    teacher: str = "fixed"  # fixed (the base model) | ema | current | tinker://…
    teacher_model: str | None = None  # another base model of the server, instead
    teacher_ema: float = 0.999
    beta: float = 0.5  # 0: KL(teacher‖student), 1: KL(student‖teacher)
    temperature_loss: float = 1.0
    top_k_loss: int = 0  # of the teacher's tokens; 0: the whole vocabulary
    token_clip: float | None = None  # of each token's term

    # Optimizer
    learning_rate: float = 2e-4
    grad_clip_norm: float = 1.0
    max_steps: int = 100

    # Logging, evaluation, checkpoints
    log_path: str | None = None
    wandb_project: str | None = None
    wandb_name: str | None = None
    eval_every: int = 20
    save_every: int = 20
    behavior_if_log_dir_exists: cli_utils.LogdirBehavior = "ask"

    base_url: str | None = None


def loss_config(config: Config) -> dict[str, float | str]:
    """loss_fn_config of generalized_jsd."""
    teacher = config.teacher_model or TEACHERS.get(config.teacher, config.teacher)
    found: dict[str, float | str] = {
        "beta": config.beta,
        "temperature": config.temperature_loss,
        "top_k": config.top_k_loss,
        "teacher": teacher,
    }
    if config.token_clip is not None:
        found["token_clip"] = config.token_clip
    if teacher == "ema":
        found["teacher_ema"] = config.teacher_ema
    return found


class Recipe:
    """A run: its clients, its data, and what a step does with them."""

    def __init__(self, config: Config, renderer_name: str, log_path: str):
        if config.prompts not in PROMPTS:
            raise ValueError(f"prompts must be one of {sorted(PROMPTS)}, not {config.prompts!r}")
        self.config = config
        self.problems = read_problems(config.data_path)
        self.test = read_problems(config.test_path) if config.test_path else []
        self.tokenizer = get_tokenizer(config.model_name)
        self.renderer = renderers.get_renderer(renderer_name, tokenizer=self.tokenizer)
        self.service = tinker.ServiceClient(
            base_url=config.base_url, user_metadata=recipe_user_metadata("recipe_opsd")
        )
        self.start, self.training = self._training_client(renderer_name, log_path)
        self.sampler = self._new_sampler()

    def _training_client(self, renderer_name: str, log_path: str) -> tuple[int, Any]:
        """The first step to take, and the client, resumed where the log has a checkpoint."""
        metadata: dict[str, str] = {}
        checkpoint_utils.add_renderer_name_to_user_metadata(metadata, renderer_name)
        last = checkpoint_utils.get_last_checkpoint(log_path)
        if last is not None:
            logger.info("Resuming from %s", last.state_path)
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

    # ---- answers ----

    def prompts_of(self, row: Problem) -> tuple[list[int], list[int]]:
        """The tokens that student and teacher see before the answer."""
        texts = PROMPTS[self.config.prompts].of(row)
        student, teacher = (
            self.renderer.build_generation_prompt([{"role": "user", "content": text}]).to_ints()
            for text in texts
        )
        if self.config.bare_student:
            student = self.tokenizer.encode(texts[0], add_special_tokens=False)
        return student, teacher

    def answers(self, rows: list[Problem], count: int, **params: Any) -> list[list[list[int]]]:
        """`count` answers of the student to each problem, all asked at once."""
        params = tinker.SamplingParams(
            max_tokens=self.config.max_tokens, stop=self.renderer.get_stop_sequences(), **params
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
            "optim/lr": config.learning_rate,
        }
        if data:
            adam = tinker.AdamParams(
                learning_rate=config.learning_rate,
                beta1=0.9,
                beta2=0.95,
                eps=1e-8,
                grad_clip_norm=config.grad_clip_norm,
            )
            future = self.training.forward_backward(data, LOSS, loss_config(config))
            optim = self.training.optim_step(adam)
            metrics |= future.result().metrics
            metrics |= optim.result().metrics or {}
            self.sampler = self._new_sampler()
        metrics |= {"time/sample": sampled - start, "time/train": time.perf_counter() - sampled}
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Greedy answers to the held-out problems: how many are right, and how far from the
        teacher they are."""
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
            scored = self.training.forward(data, LOSS, loss_config(self.config)).result()
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
    log_path = str(Path(config.log_path or default_log_path(config)).expanduser())
    cli_utils.check_log_dir(log_path, behavior_if_exists=config.behavior_if_log_dir_exists)
    ml_logger = ml_log.setup_logging(
        log_dir=log_path,
        wandb_project=config.wandb_project,
        wandb_name=config.wandb_name or Path(log_path).name,
        config=config,
    )
    recipe = Recipe(config, renderer_name, log_path)
    manager = checkpoint_utils.CheckpointManager(
        training_client=recipe.training,
        service_client=recipe.service,
        log_path=log_path,
        save_every=config.save_every,
        store=ml_logger.store,
    )
    for index in range(recipe.start, config.max_steps):
        metrics: dict[str, float] = {"progress/batch": index}
        if config.eval_every > 0 and index % config.eval_every == 0:
            metrics |= recipe.evaluate()
        metrics |= recipe.step(index)
        metrics["progress/done_frac"] = (index + 1) / config.max_steps
        if index + 1 < config.max_steps:
            manager.maybe_save(index + 1, {"batch": index + 1})
        elif config.eval_every > 0:
            metrics |= {f"final/{key}": value for key, value in recipe.evaluate().items()}
        ml_logger.log_metrics(metrics, step=index)
    if recipe.start < config.max_steps:
        manager.save_final({"batch": config.max_steps})
    ml_logger.close()


def default_log_path(config: Config) -> str:
    """A folder of the cookbook's, named for the run."""
    model = config.model_name.strip("/").replace("/", "-")
    moment = datetime.now().strftime("%Y-%m-%d-%H-%M")
    return cli_utils.runs_path("opsd", f"opsd-{model}-{config.teacher}-beta{config.beta}-{moment}")


if __name__ == "__main__":
    run(chz.entrypoint(Config))
