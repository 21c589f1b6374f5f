"""Every recipe of the cookbook whose data need no hub, unmodified, on one seeded server."""

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import tinker_cookbook.recipes
import tinsmith
from starlette.requests import Request
from support import ROOT, recipe_data
from support.chat_models import CHANNELS
from support.recipe_host import Host, running_host
from support.recipe_table import (
    BESIDE,
    HYBRIDS,
    LONG_MIXTURE,
    MIXTURE,
    OSS,
    PATH,
    QWEN3,
    RECIPES,
    REFUSED,
    RENDERER,
    SDFT,
    SEEING,
    TOOLS,
    Ended,
    Recipe,
    agrees,
    learns,
)
from support.recipes_md import VERSION, document, recipe_entry, with_entry
from support.tiny_models import PADDING, Spec, make
from support.vision_models import QWEN3_5, TOWERS
from tinsmith import launch
from tinsmith.checkpoints.store import Store
from tinsmith.demo import demo
from tinsmith.server.backend import TINKER, Backend
from tinsmith.server.routes import rest, results, sampling, training
from tinsmith.server.routes.training import Handler
from tinsmith.server.service.service import Service
from tinsmith.server.wire import training_calls
from tokenizers import Tokenizer

DOCUMENT = ROOT / "RECIPES.md"
UPDATE = bool(os.environ.get("TINSMITH_UPDATE_RECIPES"))  # writes RECIPES.md instead of reading it
NAMES = sorted({name for recipe in RECIPES for name in recipe.models} - {"MODEL"})

SCORES = ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs")
HOUSEKEEPING = {  # what every client does, at times of its own
    training.client_config, training.dynamic_config, training.telemetry, training.create_session,
    training.heartbeat, training.finish_session, results.retrieve_future, results.retrieve_futures,
    results.cancel_future, rest.healthz,
}  # fmt: skip


async def come(body: bytes) -> dict[str, Any]:
    """A body as the server's next message."""
    return {"type": "http.request", "body": body, "more_body": False}


class Calls:
    """The routes that are asked for, with the loss of a training call and what a sample scores."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def watch(self, method: str, path: str, handler: Handler) -> Handler:
        name = path.removeprefix("/") if method == "POST" else f"{method} {path.removeprefix('/')}"

        async def watched(service: Service, request: Request) -> Any:
            body = await request.body()  # which the handler then reads once more
            request = Request(request.scope, partial(come, body))
            if handler is training.forward_backward:
                head = training_calls.parse_call(body).head
                verb = "forward" if head.forward_only else name
                self.seen.add(f"{verb} ({head.loss_fn})")
            elif handler is sampling.asample:
                asked = json.loads(body)
                scored = sorted(key for key in SCORES if asked.get(key))
                self.seen.add(f"{name} ({', '.join(scored)})" if scored else name)
            elif handler not in HOUSEKEEPING:
                self.seen.add(name)
            return await handler(service, request)

        return watched

    def take(self) -> str:
        """Those since the last time."""
        names, self.seen = sorted(self.seen), set()
        return ", ".join(names)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration's model, for longer texts than it was trained on."""
    folder = tmp_path_factory.mktemp("model") / "roomy"
    folder.mkdir()
    for file in demo.MODEL.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 16384}))
    return folder


def drawn(model: Path, folder: Path, family: str, **more: int) -> Path:
    """A small random model of a hybrid family with the demonstration's tokenizer."""
    content = json.loads((model / "config.json").read_text())
    sizes = {
        "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "num_hidden_layers": 4,
        "full_attention_interval": 4, "tie_word_embeddings": True,
        "vocab_size": content["vocab_size"], **more,
    }  # fmt: skip
    make(Spec(family, sizes, kind=f"{family}_text"), folder)
    for file in model.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def hybrid(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid") / "small"
    return drawn(model, folder, "qwen3_5", intermediate_size=96, max_position_embeddings=16384)


@pytest.fixture(scope="module")
def mixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the context that the names of recipes say."""
    return drawn(
        model, tmp_path_factory.mktemp("mixture") / "small", "qwen3_5_moe",
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24,
        shared_expert_intermediate_size=24, max_position_embeddings=262144,
    )  # fmt: skip


@pytest.fixture(scope="module")
def oss(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random gpt-oss, whose tokenizer has the tokens of channels beside the others."""
    folder = tmp_path_factory.mktemp("oss") / "small"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(list(CHANNELS))
    sizes = {
        "vocab_size": tokenizer.get_vocab_size() + PADDING, "hidden_size": 64, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 8,
        "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 32,
        "max_position_embeddings": 16384, "tie_word_embeddings": False,
    }  # fmt: skip
    make(Spec("gpt_oss", sizes), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(model / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="module")
def seeing(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Qwen3.5 with a vision tower, whose tokenizer knows where an image stands."""
    folder = tmp_path_factory.mktemp("seeing") / "small"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"])
    sizes = QWEN3_5 | {
        "vocab_size": tokenizer.get_vocab_size() + PADDING, "tie_word_embeddings": True,
        "max_position_embeddings": 16384,
    }  # fmt: skip
    make(Spec("qwen3_5", sizes, seeing=True, vision=TOWERS[24]), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    shutil.copy(model / "tokenizer_config.json", folder)
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    recipe_data.write(folder, rows=8)
    return folder


@pytest.fixture(scope="module")
def calls() -> Iterator[Calls]:
    """Watches all of the server's routes."""
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch:
        for table in TINKER:
            rows = [(m, path, calls.watch(m, path, handler)) for m, path, handler in table.ROUTES]
            patch.setattr(table, "ROUTES", tuple(rows))
        yield calls


@pytest.fixture(scope="module")
def backend(
    model: Path,
    hybrid: Path,
    mixture: Path,
    oss: Path,
    seeing: Path,
    calls: Calls,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Backend]:
    own = dict.fromkeys(HYBRIDS, hybrid) | dict.fromkeys((MIXTURE, LONG_MIXTURE), mixture)
    own |= {OSS: oss, SEEING: seeing}
    models = {str(model): model} | {name: own.get(name, model) for name in NAMES}
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with tinsmith.serve(models, device="cpu", checkpoints=checkpoints, seed=0) as running:
        yield running


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with running_host(tmp_path_factory.mktemp("datasets")) as running:
        yield running


def test_recipes_md_has_what_the_table_has() -> None:
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    if UPDATE:
        text = document(text)
        DOCUMENT.write_text(text)
    assert document(text) == text


@pytest.mark.skipif(
    metadata.version("tinker-cookbook") != VERSION, reason=f"the tables are of {VERSION}"
)
def test_every_module_of_the_recipes_that_starts_is_decided_on() -> None:
    folder = Path(tinker_cookbook.recipes.__path__[0])
    started = re.compile("^if __name__ == .__main__.:", re.MULTILINE)
    found = set()
    for file in folder.rglob("*.py"):
        if file.name == "__main__.py" or started.search(file.read_text()):
            module = file.with_suffix("").relative_to(folder.parent)
            found.add(".".join(module.parts).removesuffix(".__main__"))
    assert len(found) > 30
    decided = {recipe.name.partition(" ")[0] for recipe in RECIPES} | {name for name, _ in BESIDE}
    refused = tuple(name for name, _ in REFUSED)
    left = {name for name in found - decided if not f"{name}.".startswith(refused)}
    assert not left, "modules of the cookbook that no table of recipe_table.py has"


@dataclass
class Bench:
    """What a recipe runs on: the server, the process that forks it, and the folder it runs in."""

    backend: Backend
    calls: Calls
    host: Host
    model: Path
    own: dict[str, Path]  # models whose tokenizer is not MODEL's, by their names
    work: Path

    def run(
        self,
        module: str,
        arguments: str,
        folder: Path,
        names: Sequence[str] = (QWEN3,),
        answers: str = "",
    ) -> tuple[Ended, str]:
        """Runs a recipe, a module or a script: what it left in `folder`, and the calls seen."""
        folder.mkdir(exist_ok=True)
        (folder / "input").write_text(answers)
        command = [module] if module.endswith(".py") else ["-m", module]
        self.calls.take()
        code = self.host.run(
            command=[*command, *shlex.split(arguments.replace("MODEL", str(self.model)))],
            folder=str(self.work),
            input=str(folder / "input"),
            output=str(folder / "output"),
            environment={
                "TINKER_BASE_URL": self.backend.url,
                "TINKER_API_KEY": "tml-local",
                "TINKER_COOKBOOK_RUNS_DIR": str(folder / "runs"),
                launch.MODELS: json.dumps(
                    {name: str(self.own.get(name, self.model)) for name in names}
                ),
            },
        )
        output = (folder / "output").read_text()
        assert code == 0, output[-4000:]
        return Ended(folder / "runs", self.work, output), self.calls.take()


@pytest.fixture(scope="module")
def bench(
    backend: Backend,
    calls: Calls,
    host: Host,
    model: Path,
    oss: Path,
    seeing: Path,
    work: Path,
) -> Bench:
    return Bench(backend, calls, host, model, {OSS: oss, SEEING: seeing}, work)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe(recipe: Recipe, bench: Bench, tmp_path: Path) -> None:
    for package in recipe.packages:
        pytest.importorskip(package, reason=f"needs tinker_cookbook[{recipe.extra}]")
    ended, calls = bench.run(
        recipe.module, recipe.arguments, tmp_path, recipe.models, recipe.answers
    )
    recipe.check(ended)
    entry = recipe_entry(recipe, calls)
    text = DOCUMENT.read_text()
    if metadata.version("tinker-cookbook") != VERSION:
        return
    if UPDATE:
        DOCUMENT.write_text(with_entry(text, entry))
    else:
        assert entry in text, f"RECIPES.md has another entry than was seen now:\n{entry}"


# ---- what they learn ----


def test_a_mixture_learns_from_a_recipe_that_names_one(bench: Bench, tmp_path: Path) -> None:
    """Prompt distillation under its own default name: the answers' mean loss, a step a line."""
    arguments = (
        f"{RENDERER} file_path=conversations.jsonl batch_size=4 lora_rank=8 learning_rate=1e-2 "
        "lr_schedule=constant num_epochs=10"
    )
    module = "tinker_cookbook.recipes.prompt_distillation.train"
    ended, _ = bench.run(module, arguments, tmp_path, (MIXTURE,))
    losses = [row["train_mean_nll"] for row in ended.rows("train_mean_nll")]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


# ---- one after the other ----


def test_rolling_checkpoints_are_made_resumed_from_and_taken_away(
    bench: Bench, tmp_path: Path
) -> None:
    """As the cookbook's own smoke test of them asks."""
    arguments = (
        f"{PATH} dataset=conversations.jsonl batch_size=4 num_epochs=4 lora_rank=4 save_every=2 "
        f"rolling_save_every=1 log_path={tmp_path / 'log'} behavior_if_log_dir_exists=resume"
    )
    module = "tinker_cookbook.recipes.chat_sl.train"
    _, calls = bench.run(module, f"{arguments} max_steps=4", tmp_path)
    assert "DELETE training_runs" in calls
    file = tmp_path / "log" / "checkpoints.jsonl"
    saved = [json.loads(line) for line in file.read_text().splitlines()]
    rolling = [row for row in saved if row.get("rolling")]
    periodic = [row for row in saved if not row.get("rolling") and row["name"] != "final"]
    assert rolling and periodic and saved[-1]["name"] == "final"
    assert all("sampler_path" not in row for row in rolling)
    assert all("sampler_path" in row for row in [*periodic, saved[-1]])
    store = Store(bench.backend.checkpoints)
    left = [row for row in rolling if store.folder(row["state_path"]).exists()]
    assert len(left) <= 1, "a rolling checkpoint outlived its successor"
    # As if it had been killed before its end: the last that is left is the one of step 2.
    file.write_text("".join(json.dumps(row) + "\n" for row in periodic))
    _, calls = bench.run(module, f"{arguments} max_steps=6", tmp_path)
    assert "load_weights" in calls and "create_model" not in calls
    steps = [json.loads(row)["step"] for row in (tmp_path / "log/metrics.jsonl").open()]
    assert steps[-1] == 5


def test_a_recipe_resumes_where_its_checkpoint_was_bit_for_bit(
    bench: Bench, tmp_path: Path
) -> None:
    """Greedy samples, so that a step is a function of the state that it starts from alone."""
    module = "tinker_cookbook.recipes.sdft.train"
    arguments = (
        f"{SDFT} {TOOLS} temperature=0.0 learning_rate=1e-2 groups_per_batch=2 save_every=1 "
        f"log_path={tmp_path / 'log'} behavior_if_log_dir_exists=resume max_steps=3"
    )
    checkpoints, metrics = (tmp_path / "log" / f"{n}.jsonl" for n in ("checkpoints", "metrics"))

    def last() -> tuple[int, float, float]:
        row = json.loads(metrics.read_text().splitlines()[-1])
        return row["step"], row["loss"], row["grad_norm"]

    bench.run(module, arguments, tmp_path)
    whole = last()
    saved = [line for line in checkpoints.read_text().splitlines() if '"000002"' in line]
    checkpoints.write_text("\n".join(saved) + "\n")
    metrics.unlink()
    _, calls = bench.run(module, arguments, tmp_path)
    assert "load_weights" in calls
    assert len(metrics.read_text().splitlines()) == 1
    assert last() == whole


def test_a_classifiers_checkpoints_are_judged(bench: Bench, tmp_path: Path) -> None:
    """A run's by its path, and those of a sweep, each about pictures."""
    module = "tinker_cookbook.recipes.vlm_classifier"
    sizes = f"model_name={SEEING} batch_size=4 lora_rank=4"
    judged = f"model_name={SEEING} n_eval=3 max_tokens=6"
    arguments = f"experiment_dir={tmp_path / 'one'} {sizes} max_steps=1"
    arguments += " run_sampling_evaluator=False run_nll_evaluator=False"
    bench.run(f"{module}.train", arguments, tmp_path, (SEEING,))
    [file] = (tmp_path / "one").glob("*/checkpoints.jsonl")
    path = json.loads(file.read_text().splitlines()[-1])["sampler_path"]
    ended, calls = bench.run(
        f"{module}.eval", f"dataset=caltech101 model_path={path} {judged}", tmp_path, (SEEING,)
    )
    assert re.search(r"Metrics = \{.*accuracy", ended.output) and "asample" in calls
    arguments = f"experiment_dir={tmp_path / 'many'} {sizes} num_repeats=1 num_parallel=1"
    arguments += " examples_per_class=[1] run_sampling_evaluator=False"
    bench.run(f"{module}.sweep", arguments, tmp_path, (SEEING,))
    results = tmp_path / "results.json"
    bench.run(
        f"{module}.eval_sweep",
        f"experiment_dir={tmp_path / 'many'} output_file={results} {judged}",
        tmp_path,
        (SEEING,),
    )
    [found] = json.loads(results.read_text()).values()
    assert any("accuracy" in key for key in found), found


OFF_POLICY = """
import asyncio, sys
from tinker_cookbook.distillation import train_off_policy
from tinker_cookbook.distillation.datasets import TeacherConfig
from tinker_cookbook.supervised.data import FromConversationFileBuilder
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

model, renderer, log = sys.argv[1:]
common = ChatDatasetBuilderCommonConfig(
    model_name_for_tokenizer=model, renderer_name=renderer, max_length=512, batch_size=4
)
domain = train_off_policy.DatasetWithTeacher(
    dataset_builder=FromConversationFileBuilder(
        common_config=common, file_path="conversations.jsonl"
    ),
    teacher_config=TeacherConfig(base_model=model),
)
config = train_off_policy.Config(
    learning_rate=1e-3, dataset_configs=[domain], model_name=model, recipe_name="off_policy",
    renderer_name=renderer, lora_rank=4, batch_size=4, max_steps=2, log_path=log,
)
asyncio.run(train_off_policy.main(config))
"""


def test_the_trainer_that_no_recipe_uses_distills_off_policy(bench: Bench, tmp_path: Path) -> None:
    script = tmp_path / "off_policy.py"
    script.write_text(OFF_POLICY)
    arguments = f"MODEL qwen3_disable_thinking {tmp_path / 'runs'}"
    ended, calls = bench.run(str(script), arguments, tmp_path)
    learns(2, "train/loss:sum")(ended)
    for call in ("asample (prompt_logprobs, topk_prompt_logprobs)", "cross_entropy"):
        assert call in calls


@pytest.mark.slow
def test_rl_raises_the_reward_of_a_supervised_start(bench: Bench, tmp_path: Path) -> None:
    """Supervised: an answer in a word or in many, as often as not. RL rewards those that end."""
    pytest.importorskip("math_verify", reason="needs tinker_cookbook[math-rl]")
    recipe_data.write_short_and_long(tmp_path / "answers.jsonl", rows=64)
    log = tmp_path / "supervised"
    bench.run(
        "tinker_cookbook.recipes.chat_sl.train",
        f"{PATH} dataset={tmp_path / 'answers.jsonl'} train_on_what=last_assistant_message "
        f"batch_size=16 num_epochs=4 lora_rank=8 learning_rate=5e-3 eval_every=0 log_path={log}",
        tmp_path / "a",
    )
    saved = json.loads((log / "checkpoints.jsonl").read_text().splitlines()[-1])
    ended, _ = bench.run(
        "tinker_cookbook.recipes.math_rl.train",
        f"{PATH} env=arithmetic groups_per_batch=16 group_size=8 lora_rank=8 learning_rate=2e-3 "
        f"max_steps=4 eval_every=0 load_checkpoint_path={saved['state_path']}",
        tmp_path / "b",
    )
    agrees(4)(ended)
    ends = [row["env/all/format"] for row in ended.rows("env/all/format")]
    assert 0.1 < ends[0] < 0.98 and ends[-1] > ends[0], ends
