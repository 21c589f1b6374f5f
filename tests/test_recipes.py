"""Every recipe of the cookbook whose data need no hub, unmodified, on one seeded server."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import recipe_data
import tinsmith
from recipes import RECIPES, Ended, Recipe
from recipes_md import document, recipe_entry, with_entry
from starlette.requests import Request
from tinsmith import launch, rest, routes, transfers, wire
from tinsmith.demo import demo
from tinsmith.routes import Handler
from tinsmith.server import Backend
from tinsmith.service import Service

DOCUMENT = Path(__file__).parent.parent / "RECIPES.md"
UPDATE = bool(os.environ.get("TINSMITH_UPDATE_RECIPES"))  # writes RECIPES.md instead of reading it
NAMES = sorted({name for recipe in RECIPES for name in recipe.models} - {"MODEL"})

SCORES = ("prompt_logprobs", "topk_prompt_logprobs", "target_prompt_logprobs")
HOUSEKEEPING = {  # what every client does, at times of its own
    routes.client_config, routes.dynamic_config, routes.telemetry, routes.create_session,
    routes.heartbeat, routes.finish_session, routes.retrieve_future, routes.retrieve_futures,
    routes.cancel_future, rest.healthz,
}  # fmt: skip


class Calls:
    """The routes that are asked for, with the loss of a training call and what a sample scores."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def watch(self, method: str, path: str, handler: Handler) -> Handler:
        name = path.removeprefix("/") if method == "POST" else f"{method} {path.removeprefix('/')}"

        async def watched(service: Service, request: Request) -> Any:
            if handler is routes.forward_backward:
                message = wire.parse_forward_backward(await routes.read_body(request))
                verb = "forward" if message.forward_only else name
                self.seen.add(f"{verb} ({message.loss_fn})")
            elif handler is routes.asample:
                body = await routes.read_json(request)
                scored = sorted(key for key in SCORES if body.get(key))
                self.seen.add(f"{name} ({', '.join(scored)})" if scored else name)
            elif handler not in HOUSEKEEPING:
                self.seen.add(name)
            return await handler(service, request)

        return watched

    def take(self) -> str:
        """Those since the last time."""
        names, self.seen = sorted(self.seen), set()
        return ", ".join(names)


class Host:
    """The process that recipes are forked from: recipe_host.py."""

    def __init__(self, environment: dict[str, str]):
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("recipe_host.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        assert self._answer() == "ready"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def run(self, **job: object) -> int:
        assert self.process.stdin is not None
        print(json.dumps(job), file=self.process.stdin, flush=True)
        return int(self._answer())


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
        for table in (routes, rest, transfers):
            rows = [(m, path, calls.watch(m, path, handler)) for m, path, handler in table.ROUTES]
            patch.setattr(table, "ROUTES", tuple(rows))
        yield calls


@pytest.fixture(scope="module")
def backend(
    model: Path, calls: Calls, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Backend]:
    models = {str(model): model} | dict.fromkeys(NAMES, model)
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    with tinsmith.serve(models, device="cpu", checkpoints=checkpoints, seed=0) as running:
        yield running


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(tmp_path_factory.mktemp("datasets")),
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
    }
    running = Host(environment)
    yield running
    running.process.stdin.close()
    running.process.wait()


def test_recipes_md_has_what_the_table_has() -> None:
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    if UPDATE:
        text = document(text)
        DOCUMENT.write_text(text)
    assert document(text) == text


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
def test_recipe(
    recipe: Recipe,
    backend: Backend,
    calls: Calls,
    host: Host,
    model: Path,
    work: Path,
    tmp_path: Path,
) -> None:
    for package in recipe.packages:
        pytest.importorskip(package, reason=f"needs tinker_cookbook[{recipe.extra}]")
    (tmp_path / "input").write_text(recipe.answers)
    names = {name: str(model) for name in recipe.models}
    arguments = shlex.split(recipe.arguments.replace("MODEL", str(model)))
    calls.take()
    code = host.run(
        command=["-m", recipe.module, *arguments],
        folder=str(work),
        input=str(tmp_path / "input"),
        output=str(tmp_path / "output"),
        environment={
            "TINKER_BASE_URL": backend.url,
            "TINKER_API_KEY": "tml-local",
            "TINKER_COOKBOOK_RUNS_DIR": str(tmp_path / "runs"),
            launch.MODELS: json.dumps(names),
        },
    )
    output = (tmp_path / "output").read_text()
    assert code == 0, output[-4000:]
    recipe.check(Ended(tmp_path / "runs", work, output))
    entry = recipe_entry(recipe, calls.take())
    text = DOCUMENT.read_text()
    if UPDATE:
        DOCUMENT.write_text(with_entry(text, entry))
    else:
        assert entry in text, f"RECIPES.md has another entry than was seen now:\n{entry}"
