"""LiteLLM and inspect-ai against a server, on request. They bring too much to be the tests'
dependencies, and want different versions of OpenAI's client: each has an environment of its own.

    pip install litellm mcp && PYTHONPATH=tests python tools/peers/other_clients.py litellm
    pip install inspect-ai && PYTHONPATH=tests python tools/peers/other_clients.py inspect

LiteLLM asks through both APIs, streamed and not, with a tool. Inspect's OpenAI provider runs an
evaluation against a checkpoint while the run trains on; then again, with the same answers.
"""

import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import tinker
from conftest import make_datum
from support.chat_models import WEATHER
from support.inference_server import ASKED, serve
from tinsmith.server.backend import Backend

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 200}


def with_litellm(backend: Backend, path: str) -> None:
    """The same answer four times."""
    import litellm

    places = (
        {"model": f"openai/{path}", "base_url": f"{backend.url}/v1"},
        {"model": f"anthropic/{path}", "base_url": backend.url},
    )
    for place in places:
        given = {**place, "api_key": "any", "messages": ASKED, "tools": [WEATHER], **GREEDY}
        whole = litellm.completion(**given).choices[0].message
        chunks = list(litellm.completion(**given, stream=True))
        built = litellm.stream_chunk_builder(chunks).choices[0].message
        for message in (whole, built):
            [call] = message.tool_calls
            print(place["model"][:10], message.content, call.function.name, call.function.arguments)
            assert message.content == "I look 你 😀." and call.function.name == "weather"
            assert json.loads(call.function.arguments) == {"town": "Zürich"}


def with_inspect(backend: Backend, path: str) -> None:
    """Two evaluations, the first while the run that made the checkpoint's weights trains."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import Sample
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_ai.scorer import includes
    from inspect_ai.solver import generate

    samples = [Sample(input=ASKED[0]["content"], target="weather", id=n) for n in range(8)]
    task = Task(dataset=samples, solver=generate(), scorer=includes())
    config = GenerateConfig(temperature=0.9, max_tokens=60, seed=3, logprobs=True)

    def evaluate() -> list[Any]:
        url = f"{backend.url}/v1"
        place = {"base_url": url, "api_key": "any", "responses_api": False}
        model = get_model(f"openai/{path}", config=config, **place)
        [log] = eval(task, model=model, display="none", log_dir=tempfile.mkdtemp())
        assert log.status == "success" and log.samples is not None, str(log.error)[:500]
        print("inspect-ai", log.status, log.results.scores[0].metrics)
        return [sample.output.choices[0] for sample in log.samples]

    steps, ended = 0, threading.Event()

    def train() -> None:
        nonlocal steps
        with backend.service_client() as client:
            run = client.create_training_client_from_state(path.replace("sampler_", "", 1)).result()
            while not ended.is_set():
                datum = make_datum([5, 6, 7], [6, 7, 8], weights=[1.0] * 3)
                run.forward_backward([datum], "cross_entropy").result()
                run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
                steps += 1

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        while not steps and trainer.is_alive():
            ended.wait(0.1)
        first, before = evaluate(), steps
    finally:
        ended.set()
        trainer.join()
    again = evaluate()
    print("steps taken meanwhile:", before)
    assert before > 1 and [one.message.text for one in first] == [o.message.text for o in again]
    assert [one.logprobs for one in first] == [one.logprobs for one in again]


def main() -> None:
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    ask = {"litellm": with_litellm, "inspect": with_inspect}[sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder, serve(Path(folder)) as (backend, path):
        ask(backend, path)


if __name__ == "__main__":
    sys.exit(main())
