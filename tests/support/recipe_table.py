"""The cookbook's recipes: what each is called with, where its data come from, and what must hold.

RECIPES is the table, a row for each entry of RECIPES.md. test_recipes.py runs the rows; MODEL in a
row's arguments is the folder of a model, here the demonstration's.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]

QWEN3 = "Qwen/Qwen3-8B"  # a name that the cookbook knows a renderer for
NAMED = f"model_name={QWEN3}"
RENDERER = "renderer_name=qwen3_disable_thinking"
PATH = f"model_name=MODEL {RENDERER}"
# The names that recipes take where none is given: MODEL is then a small random Qwen3.5.
HYBRIDS = ("Qwen/Qwen3.5-4B", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-9B-Base")
SMALL, CHAT, BASE = HYBRIDS
MIXTURE = "Qwen/Qwen3.6-35B-A3B"  # likewise: a small random one with experts
LONG_MIXTURE = f"{MIXTURE}:peft:262144"
SEEING = "Qwen/Qwen3.5-27B"  # likewise: a small random one with a vision tower
OSS = "openai/gpt-oss-20b"  # likewise: a small random one whose tokenizer knows channels


@dataclass(frozen=True)
class Ended:
    """What a recipe left behind."""

    folder: Path  # its TINKER_COOKBOOK_RUNS_DIR
    work: Path  # its current folder
    output: str

    def rows(self, key: str) -> Rows:
        """The rows of its metrics that have a key, of all its stages."""
        files = sorted(self.folder.rglob("metrics.jsonl"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return [row for row in map(json.loads, lines) if key in row]

    def checkpoints(self) -> Rows:
        files = sorted(self.folder.rglob("checkpoints.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]


Check = Callable[[Ended], None]


@dataclass(frozen=True)
class Recipe:
    """A row. `name` is the module behind tinker_cookbook., and a variant's words in brackets."""

    name: str
    arguments: str
    data: str
    check: Check
    models: tuple[str, ...] = ()  # the names that MODEL is served under
    packages: tuple[str, ...] = ()  # that the recipe imports and `pip install tinsmith` lacks
    extra: str = ""  # of the cookbook, that brings them
    answers: str = ""  # for a recipe that asks

    @property
    def module(self) -> str:
        return "tinker_cookbook." + self.name.partition(" ")[0]

    @property
    def command(self) -> str:
        served = "".join(f"--model {name}=MODEL " for name in self.models)
        return f"tinsmith run {served}-m {self.module} {self.arguments}".rstrip()


# ---- what must hold ----


def learns(steps: int, key: str = "train_mean_nll") -> Check:
    """Every step has a loss that is a number."""

    def check(ended: Ended) -> None:
        rows = ended.rows(key)
        assert len(rows) == steps, rows
        assert all(math.isfinite(row[key]) and row[key] > 0 for row in rows), rows

    return check


def agrees(steps: int) -> Check:
    """The sampler's log-probabilities are the trainer's, at every step."""

    def check(ended: Ended) -> None:
        rows = ended.rows("optim/kl_sample_train_v1")
        assert len(rows) == steps, rows
        for row in rows:
            assert abs(row["optim/kl_sample_train_v1"]) < 1e-6
            assert abs(row["optim/kl_sample_train_v2"]) < 1e-12

    return check


def logs(key: str, steps: int) -> Check:
    def check(ended: Ended) -> None:
        assert len(ended.rows(key)) == steps, ended.output[-3000:]

    return check


def pictures(steps: int, folder: str = "pictures") -> Check:
    """Every step of a classifier has a loss, and its answers about pictures are judged."""

    def check(ended: Ended) -> None:
        files = list(ended.work.glob(f"{folder}/*/metrics.jsonl"))
        assert files
        for file in files:
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
            assert len(losses) >= steps and all(0 < loss < 20 for loss in losses), rows
            assert any("accuracy" in key for row in rows for key in row), rows
            scores = [row["test/nll"] for row in rows if "test/nll" in row]
            assert all(0 < score < 20 for score in scores), scores

    return check


def both(*checks: Check) -> Check:
    def check(ended: Ended) -> None:
        for one in checks:
            one(ended)

    return check


def starts_at(key: str, value: float, steps: int) -> Check:
    """The first step's number is known: the adapter has not changed the model yet."""

    def check(ended: Ended) -> None:
        rows = ended.rows(key)
        assert len(rows) == steps, ended.output[-3000:]
        assert abs(rows[0][key] - value) < 1e-5, rows[0]

    return check


def says(pattern: str) -> Check:
    def check(ended: Ended) -> None:
        assert re.search(pattern, ended.output), ended.output[-3000:]

    return check


def leaves(pattern: str, wanted: Callable[[str], bool]) -> Check:
    """A file of a known content, in the recipe's runs or in its current folder."""

    def check(ended: Ended) -> None:
        found = [*ended.folder.rglob(pattern), *ended.work.glob(pattern)]
        assert len(found) == 1, found
        assert wanted(found[0].read_text()), found[0].read_text()[:3000]

    return check


def probabilities(ended: Ended) -> None:
    """The decision's demonstration prints one for each team, rounded to 4 digits."""
    shown = json.loads(ended.output[ended.output.index("{") : ended.output.rindex("}") + 1])
    assert len(shown) == 4 and abs(sum(shown.values()) - 1) < 1e-3, shown


SDFT = f"{PATH} groups_per_batch=4 max_tokens=12 lora_rank=4 max_steps=2 eval_every=0"
TOOLS = "dataset=toolalpaca toolalpaca_data_path=questions"
RL = "lora_rank=4 max_steps=2"
GAME = f"{RENDERER} max_tokens=4 eval_every=0 max_steps=2"
STREAM = "stream_minibatch_config"

RECIPES: Sequence[Recipe] = (
    Recipe(
        "recipes.sl_basic",
        "lora_rank=4 max_steps=2 eval_every=1",
        "hub: HuggingFaceH4/no_robots",
        both(learns(2), logs("test/nll", 2)),
        models=(BASE,),
    ),
    Recipe(
        "recipes.sl_loop",
        "batch_size=4 lora_rank=4 max_steps=2",
        "hub: HuggingFaceH4/no_robots",
        learns(2),
        models=(BASE,),
    ),
    Recipe(
        "recipes.chat_sl.train",
        f"{RENDERER} dataset=conversations.jsonl batch_size=4 lora_rank=4 max_steps=2",
        "a file of conversations; or hub: HuggingFaceH4/no_robots, allenai/tulu-3-sft-mixture",
        learns(2),
        models=(BASE,),
    ),
    Recipe(
        "recipes.prompt_distillation.train",
        f"{RENDERER} file_path=conversations.jsonl batch_size=4 lora_rank=4 max_steps=2",
        "a file of conversations",
        learns(2),
        models=(MIXTURE,),
    ),
    Recipe(
        "recipes.distillation.off_policy_reasoning",
        f"{PATH} batch_size=4 max_prompts=8 buffer_size=8 lora_rank=4 max_steps=2",
        "hub: open-thoughts/OpenThoughts3-1.2M",
        learns(2),
    ),
    Recipe(
        "recipes.rl_basic",
        f"max_tokens=4 remove_constant_reward_groups=True {RL}",
        "hub: openai/gsm8k",
        agrees(1),
        models=(BASE,),
        packages=("math_verify", "pylatexenc"),
        extra="math-rl",
    ),
    Recipe(
        "recipes.rl_loop",
        f"{NAMED} batch_size=2 group_size=2 max_tokens=8 {RL}",
        "hub: openai/gsm8k (without a reward, as from the test's model, it takes no step)",
        logs("reward/total", 2),
        models=(QWEN3,),
        packages=("math_verify", "pylatexenc"),
        extra="math-rl",
    ),
    Recipe(
        "recipes.math_rl.train",
        f"{RENDERER} env=arithmetic groups_per_batch=2 group_size=2 {RL}",
        "none: env=arithmetic makes its own",
        agrees(2),
        models=(CHAT,),
        packages=("math_verify", "pylatexenc"),
        extra="math-rl",
    ),
    Recipe(
        "recipes.math_rl.train (asynchronous)",
        f"{PATH} env=arithmetic groups_per_batch=2 group_size=2 max_steps_off_policy=2 {RL}",
        "none",
        logs("optim/kl_sample_train_v1", 2),
        packages=("math_verify", "pylatexenc"),
        extra="math-rl",
    ),
    Recipe(
        "recipes.math_rl.train (streamed)",
        f"{PATH} env=arithmetic groups_per_batch=4 group_size=2 "
        f"{STREAM}.groups_per_batch=4 {STREAM}.num_minibatches=2 {RL}",
        "none",
        agrees(2),
        packages=("math_verify", "pylatexenc"),
        extra="math-rl",
    ),
    Recipe(
        "recipes.preference.dpo.train",
        f"{RENDERER} dataset=hhh batch_size=4 max_steps=2",
        "hub: Anthropic/hh-rlhf, nvidia/HelpSteer3 or argilla/ultrafeedback-binarized-preferences",
        starts_at("dpo_loss", math.log(2), 2),
        models=(BASE,),
    ),
    Recipe(
        "recipes.preference.shorter.train",
        f"{PATH} batch_size=2 group_size=2 max_tokens=8 eval_every=0 max_steps=2",
        "none",
        agrees(2),
    ),
    Recipe(
        "recipes.preference.rlhf.rlhf_pipeline",
        f"base_model={QWEN3} batch_size=4 lora_rank=4 rl_max_tokens=8 rl_group_size=2 "
        "eval_every=0 max_steps=2",
        "hub: HuggingFaceH4/no_robots, Anthropic/hh-rlhf",
        both(learns(4), agrees(2)),
        models=(QWEN3,),
    ),
    Recipe(
        "recipes.distillation.on_policy_distillation",
        f"{RENDERER} dataset=deepmath groups_per_batch=2 group_size=2 max_tokens=8 {RL}",
        "hub: zwhe99/DeepMath-103K or allenai/tulu-3-sft-mixture",
        both(agrees(2), starts_at("teacher_kl", 0, 2)),
        models=(BASE, CHAT),
    ),
    Recipe(
        "recipes.distillation.on_policy_multi_teacher",
        f"{PATH} deepmath_teacher_model=MODEL tulu3_teacher_model=MODEL "
        "deepmath_groups_per_batch=2 tulu3_groups_per_batch=2 group_size=2 max_tokens=8 "
        f"{RL}",
        "hub: zwhe99/DeepMath-103K, allenai/tulu-3-sft-mixture",
        both(agrees(2), starts_at("teacher_kl", 0, 2)),
    ),
    Recipe(
        "recipes.sdft.train",
        f"{SDFT} {TOOLS}",
        "a folder of questions and answers (datasets' save_to_disk)",
        logs("sdft/num_datums", 2),
    ),
    Recipe(
        "recipes.sdft.train (reverse KL, a new teacher at each step)",
        f"{SDFT} {TOOLS} reverse=True teacher_sync_every=1",
        "the same",
        logs("sdft/reverse_kl_mean", 2),
    ),
    Recipe(
        "recipes.sdft.train (sciknoweval)",
        f"{SDFT} dataset=sciknoweval",
        "hub: hicai-zju/SciKnowEval",
        logs("sdft/num_datums", 2),
    ),
    Recipe(
        "recipes.sdft.run_continual_learning",
        f"{NAMED} data_dir=continual batch_size=4 max_tokens=12 lora_rank=4 topk=5 "
        "learning_rates=1e-3",
        "the SDFT paper's folders of tool use and science",
        logs("sdft/num_datums", 8),
        models=(QWEN3,),
    ),
    Recipe(
        "recipes.sdft.benchmark",
        f"{PATH} data_dir=continual groups_per_batch=4 max_tokens=12 lora_rank=4 max_steps=2 "
        "sft_batch_size=4 sft_max_steps=2 eval_every=0",
        "the SDFT paper's folder of science",
        both(logs("sdft/num_datums", 2), learns(2)),
    ),
    Recipe(
        "recipes.multiplayer_rl.guess_number.train",
        f"batch_size=1 group_size=2 {GAME}",
        "none",
        agrees(2),
        models=(SMALL,),
    ),
    Recipe(
        "recipes.multiplayer_rl.twenty_questions.train",
        f"batch_size=1 group_size=2 {GAME}",
        "none",
        agrees(2),
        models=(SMALL, CHAT),
    ),
    Recipe(
        "recipes.multiplayer_rl.text_arena.train",
        f"batch_size=4 num_train_datapoints=8 num_test_datapoints=2 {GAME}",
        "none",
        agrees(2),
        models=(SMALL,),
        packages=("textarena",),
        extra="multiplayer-rl",
    ),
    Recipe(
        "recipes.rubric.generate_data",
        "",
        "none: it makes some",
        leaves(
            "tinker_cookbook/example_data/example_rubric_test.jsonl", lambda text: "125" in text
        ),
        models=("MODEL",),
    ),
    Recipe(
        "recipes.rubric.train",
        f"{PATH} grader_llm_name=MODEL grader_renderer_name=qwen3_disable_thinking "
        f"groups_per_batch=2 train_group_size=2 max_tokens=8 eval_every=0 {RL}",
        "recipes.rubric.generate_data",
        agrees(2),
    ),
    Recipe(
        "recipes.rubric.prometheus_experimental",
        f"{PATH} grader_llm_name=MODEL grader_renderer_name=qwen3_disable_thinking "
        f"groups_per_batch=2 train_group_size=2 max_tokens=8 {RL}",
        "hub: prometheus-eval/Feedback-Collection",
        agrees(2),
    ),
    Recipe(
        "recipes.rubric.debug_env",
        "",
        "in the module",
        says("Extracted Score: "),
        models=(CHAT, MIXTURE),
    ),
    Recipe(
        "recipes.decisions.demo",
        f"{NAMED}",
        "what is typed",
        probabilities,
        models=(QWEN3,),
        answers="How much is it?\n\n",
    ),
    Recipe(
        "recipes.decisions.forecasting",
        f"{PATH} data_path=markets.csv batch_size=2 max_train_questions=4 "
        "max_validation_questions=2 lora_rank=4 max_steps=2",
        "prophetarena/Prophet-Arena-Subset-1200, a file of the hub",
        logs("train/loss", 2),
    ),
    Recipe(
        "recipes.forecasting.train",
        f"{PATH} data_path=markets.csv groups_per_batch=1 group_size=1 max_train_questions=4 "
        "max_validation_questions=1 validation_group_size=1 max_tokens=8 lora_rank=4 max_steps=2",
        "prophetarena/Prophet-Arena-Subset-1200, a file of the hub",
        agrees(2),
    ),
    Recipe(
        "recipes.rl_numerics_check.train",
        f"{RENDERER} groups_per_batch=1 group_size=1 max_tokens=8 task.num_pages_min=2 "
        f"task.num_pages_max=2 task.page_chars=100 {RL}",
        "hub: Salesforce/wikitext",
        agrees(2),
        models=(LONG_MIXTURE,),
    ),
    Recipe(
        "recipes.true_thinking_score.analyze",
        f"{PATH} n_problems=2 max_tokens=32",
        "hub: HuggingFaceH4/MATH-500 or openai/gsm8k",
        leaves("tts_summary.json", lambda text: json.loads(text)["n_problems_succeeded"] == 2),
        packages=("math_verify", "pylatexenc"),
        extra="math-rl",
    ),
    Recipe(
        "recipes.true_thinking_score.run_small_experiment",
        "",
        "none",
        leaves("tts_results.json", lambda text: '"error"' not in text),
        models=(SMALL,),
    ),
    Recipe(
        "recipes.prompt_distillation.create_data",
        "output_file=made.jsonl",
        "the cookbook's multilingual.txt, in the current folder's tinker_cookbook/example_data",
        leaves("made.jsonl", lambda text: True),
        models=(MIXTURE,),
    ),
    Recipe(
        "recipes.chat_sl.sweep",
        "recipe=sft base.model_name=MODEL base.renderer_name=qwen3_disable_thinking "
        "base.dataset=conversations.jsonl base.batch_size=4 learning_rates=[1e-4,1e-3] "
        "lora_ranks=[4] training_budget_examples=8",
        "its recipe's",
        learns(4),
        models=("MODEL",),
    ),
    Recipe(  # what chat_sl.sweep.launch_all starts for this model, with fewer and other data
        "recipes.chat_sl.sweep (gpt-oss)",
        f"recipe=sft base.model_name={OSS} base.dataset=conversations.jsonl base.batch_size=4 "
        "learning_rates=[1e-3] lora_ranks=[4] training_budget_examples=8",
        "its recipe's",
        learns(2),
        models=(OSS,),
    ),
    Recipe(
        "recipes.vlm_classifier.train",
        f"experiment_dir=pictures model_name={SEEING} batch_size=4 num_epochs=1 lora_rank=4 "
        "eval_every=2 n_eval=4 max_tokens=8 behavior_if_log_dir_exists=delete",
        "hub: dpdl-benchmark/caltech101; a folder of that name here",
        pictures(steps=2),
        models=(SEEING,),
    ),
    Recipe(
        "recipes.vlm_classifier.sweep",
        f"experiment_dir=pictures_sweep model_name={SEEING} batch_size=4 num_repeats=1 "
        "lora_rank=4 examples_per_class=[1,2] num_parallel=1",
        "the same",
        pictures(steps=1, folder="pictures_sweep"),
        models=(SEEING,),
    ),
    Recipe(
        "eval.custom_evaluators",
        "",
        "in the module",
        says(r"\{'accuracy': [01]\.\d"),
        models=(CHAT,),
    ),
    Recipe(
        "eval.run_inspect_evals",
        "model_name=Qwen/Qwen3.5-9B renderer_name=qwen3_disable_thinking max_tokens=16 "
        "tasks=tinker_cookbook.eval.custom_inspect_task:example_lm_as_judge",
        "in the task, here; hub for most of inspect's own",
        says(r"Inspect evaluation completed. Metrics: \{'qa_dataset/accuracy'"),
        models=(CHAT,),
        packages=("inspect_ai",),
        extra="inspect",
    ),
)

SOUND = "sound: tinsmith serves models of text"
REFUSED: Sequence[tuple[str, str]] = (
    ("recipes.audio", SOUND),
    ("recipes.code_rl", "its rewards come from a SandboxFusion server or Modal"),
    ("recipes.harbor_rl", "its tasks run on Modal"),
    ("recipes.distillation.on_policy_distillation_harbor_multi_turn", "its tasks run on Modal"),
    ("recipes.search_tool", "it asks a Chroma database and Gemini's embeddings"),
    ("recipes.verifiers_rl", "its environments are packages of a hub of their own"),
)
# Modules that start beside a recipe. They are no recipes themselves.
BESIDE: Sequence[tuple[str, str]] = (
    ("recipes.vlm_classifier.eval", "judges a checkpoint of recipes.vlm_classifier.train"),
    ("recipes.vlm_classifier.eval_sweep", "judges those of recipes.vlm_classifier.sweep"),
    ("recipes.chat_sl.sweep.cli", "the same as recipes.chat_sl.sweep"),
    ("recipes.chat_sl.sweep.launch_all", "starts recipes.chat_sl.sweep for many models by name"),
    ("recipes.chat_sl.sweep.analyze", "reads what a sweep has left; asks no server"),
    ("recipes.forecasting.data", "downloads the data; asks no server"),
    ("recipes.multiplayer_rl.text_arena.play", "somebody plays against a checkpoint"),
)
