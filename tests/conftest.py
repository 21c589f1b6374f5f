"""Fixtures that several test files share: a tiny random model, and a server on it.

The model is a Qwen3 in float32 whose vocabulary is larger than its tokenizer's (a padded one, as
real checkpoints have). Everything is made once a session; a test that changes a server's state uses
its own run, so that the order of tests does not matter.

`pytest` runs in several processes (pytest-xdist), each of which takes a file at a time: a file's
tests run in their order, and its fixtures are made once. One file alone runs without others.
"""

import gc
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import TESTS, emulated_mode, lost_card, matrix

gc.disable()  # until the tests are collected: a third of that time
# A file may use what another one has, wherever that is: no two have one name.
FOLDERS = (folder for folder in sorted(Path(__file__).parent.iterdir()) if folder.is_dir())
sys.path += [str(folder) for folder in FOLDERS if folder.name != "support"]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TINKER_TELEMETRY", "0")
# The models are too small for more of torch's threads, and waiting ones take others' time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is saved without a folder being named must not end in the user's own data.
DATA_HOME = tempfile.TemporaryDirectory()
os.environ["XDG_DATA_HOME"] = DATA_HOME.name
# A recipe leaves its client to the end of its process, and that client warns every ten seconds of a
# server that is gone: in whatever test runs then.
logging.getLogger("tinker.lib.internal_client_holder").addFilter(
    lambda record: "heartbeat failed" not in record.getMessage()
)
# A shell's background job ignores Ctrl-C, and so would the tests and all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)

VOCAB = 304  # ids from the tokenizer's size on stand for nothing
TOKENIZER = 290
CONTEXT = 128
TEXT = [
    "The quick brown fox jumps over the lazy dog and the dog sleeps.",
    "A small model learns to answer: the answer is in the question.",
    "stop. Stop! STOP? user: assistant: one two three four five six seven",
]


# What `pytest -m quick` leaves out: files that take long or begin programs of their own, GPUs'
# devices, and of the CPU's instruction sets all but the widest.
SLOW_FILES = (
    "anthropic", "api_arrays", "attack_engine", "attack_server", "attack_store", "benchmarks",
    "block", "card_programs", "card_runner", "changed_arrays", "chunking", "cli", "compare",
    "connections", "cookbook", "crew", "custom_loss", "disk", "dlpack", "docs", "docs_snippets",
    "event_loop", "export", "failed_step", "foreign_page", "gather_backward", "gguf", "gguf_export",
    "hostile_graphs", "identity", "interrupt", "jsd_topk", "kill", "launch", "lost_card",
    "notebooks", "openai", "opsd", "opsd_recipe", "overload", "page", "peers", "recipes",
    "replica_faults", "replica_parts", "replica_sampling", "replica_server", "serve_command",
    "server_answers", "server_sampling", "soak", "store_server", "turns", "types",
    "weights_lifecycle",
)  # fmt: skip
SLOW_DEVICES = re.compile("cuda|gpu|emulat|cpu-")


# The files that take longest come first, so that no process is left with one at the end.
FIRST_FILES = (
    "sample", "docs_snippets", "traffic", "recipes", "ops", "benchmarks", "compare", "cuda",
    "cookbook", "kill", "notebooks", "launch", "emulated_order", "cublaslt", "lost_card", "cli",
    "card_programs", "cuda_device", "optimizer", "text", "card_runner",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --full."""
    parser.addoption(
        "--full",
        action="store_true",
        help="also what takes long (-m slow), and on the emulated GPU every test with every model "
        "and setting (tests/support/matrix.py); what is named, or chosen by -k, runs anyway",
    )


def pytest_collection_finish() -> None:
    """What was imported stays: no later garbage collection looks at it."""
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses what runs, marks what is quick, and orders the files."""
    left_out = set[pytest.Item]()
    named = config.getoption("keyword") or any("::" in path for path in config.args)
    if not config.getoption("full") and not named:
        left_out = matrix.left_out(items)
        all_of_them = [Path(path).resolve() for path in config.args] == [TESTS]
        if all_of_them and not config.getoption("markexpr"):
            left_out.update(item for item in items if item.get_closest_marker("slow"))
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
    for item in items:
        slow = item.path.stem.removeprefix("test_") in SLOW_FILES
        if not slow and not SLOW_DEVICES.search(item.nodeid):
            item.add_marker("quick")
    place = {name: number for number, name in enumerate(FIRST_FILES)}
    items.sort(key=lambda item: place.get(item.path.stem.removeprefix("test_"), len(place)))


def pytest_configure(config: pytest.Config) -> None:
    """Reads how the emulated GPU's modes are chosen (emulated_mode.py), and sees to it that a lost
    GPU, or a test that hangs, costs one test (lost_card.py)."""
    lost_card.register(config)
    try:
        config.stash[CHOICE] = emulated_mode.Choice()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


CHOICE: pytest.StashKey[emulated_mode.Choice] = pytest.StashKey()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Puts the emulated GPU in the test's mode."""
    before = os.environ.get(emulated_mode.MODE)
    os.environ[emulated_mode.MODE] = item.config.stash[CHOICE].of(name_of(item))
    engine = sys.modules.get("support.op_devices")
    if engine:
        engine.begin_test()
    try:
        return (yield)
    finally:
        if before is None:
            del os.environ[emulated_mode.MODE]
        else:
            os.environ[emulated_mode.MODE] = before


def name_of(item: pytest.Item) -> str:
    """A test's name, wherever pytest was begun."""
    return f"{item.path.name}::{item.nodeid.partition('::')[2]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Says in a failure's report which mode the emulated GPU was in."""
    report = yield
    engine = sys.modules.get("support.op_devices")
    if report.failed and engine and engine.emulated_used():
        mode = os.environ[emulated_mode.MODE]
        again = f"{mode}; {emulated_mode.MODE}={mode} puts it there again"
        report.sections.append(("the emulated GPU's mode", again))
    return report


WORKERS_MAX = 4  # each takes up to 2 GB


@pytest.hookimpl(optionalhook=True)  # where xdist is not installed, nobody asks
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many processes run the tests: one more than cores, because tests also wait; none beside a
    single file."""
    files = {argument.partition("::")[0] for argument in config.args}
    if len(files) == 1 and Path(*files).is_file():
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, WORKERS_MAX)


def make_tokenizer(folder: Path) -> None:
    """A byte-level BPE tokenizer with an end of sequence, trained on three sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.save_pretrained(folder)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen3 of 2 layers with random weights, in float32."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("models") / "tiny"
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def server(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """A server on a free port of the loopback, with `.url` and `.checkpoints`."""
    from tinsmith.server.backend import Backend
    from tinsmith.server.service.config import ServerConfig

    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir},
            checkpoints=tmp_path_factory.mktemp("checkpoints"),
            device="cpu",
            threads=1,
        )
    ) as backend:
        yield backend


@pytest.fixture
def service_client(server) -> Iterator:
    """The SDK's own client on the server; its session ends with the test."""
    client = server.service_client()
    with client:
        yield client


@pytest.fixture(scope="module")
def model(tiny_model_dir: Path):
    """The face on the tiny model, one thread of the CPU."""
    import tinsmith

    return tinsmith.Model(tiny_model_dir, device="cpu", threads=1)


@pytest.fixture
def adapter(model):
    """A small adapter of the face whose matrices are all away from zero."""
    from support import tiny_models

    made = model.lora(rank=4, seed=1)
    tiny_models.randomize(made.core)
    return made


@pytest.fixture(params=("cpu", "cuda", "cuda-emulated"))
def on(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device that a test's models are on (tiny_models.py), each in turn; or why there is
    none."""
    from support.op_devices import device
    from support.tiny_models import DEVICE

    device(request.param)
    before = DEVICE.set(request.param)
    yield request.param
    DEVICE.reset(before)


# ---- what tests say often ----


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What tinsmith has logged in this test so far: threads of other packages log things too."""
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith("tinsmith")]


def sdk_asks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's clients that are given no address ask this server. Those without a session are kept
    for the process by the arguments they were given, so that another file's would be found."""
    from tinker.lib import internal_client_holder

    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-local")
    kept = getattr(internal_client_holder, "sessionless_holder_cache", None)
    if kept is not None:  # older SDKs keep none
        monkeypatch.setattr(kept, "_holders", {})


def make_datum(tokens: list[int], targets, **inputs):
    """A tinker.Datum; arrays are given as lists or NumPy arrays."""
    import numpy as np
    import tinker

    arrays = {key: np.asarray(value, np.float32) for key, value in inputs.items()}
    if targets is not None:
        arrays["target_tokens"] = np.asarray(targets, np.int64)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens), loss_fn_inputs=arrays)


def logprobs(output) -> list:
    """The log-probabilities of a ForwardBackwardOutput, one array for each datum."""
    return [item["logprobs"].to_numpy() for item in output.loss_fn_outputs]


class Wire:
    """The protocol's requests, without the SDK."""

    def __init__(self, url: str, key: str = "tml-local"):
        import httpx

        self.http = httpx.Client(base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60)

    def post(self, path: str, /, **body) -> dict:
        return self.http.post(path, json=body).raise_for_status().json()

    def create(self, base: str = "tiny") -> str:
        session = self.post("/create_session", tags=[], user_metadata={}, sdk_version="0")
        lora = {"rank": 4, "seed": 1}
        reply = self.post(
            "/create_model",
            session_id=session["session_id"],
            model_seq_id=0,
            base_model=base,
            lora_config=lora,
        )
        assert self.result(reply)["model_id"] == reply["model_id"]
        return reply["model_id"]

    def forward_backward(
        self, model: str, seq: int, data: list, *, compress: bool = False, change=None
    ) -> dict:
        """`change` is called on the protobuf message before it is sent."""
        import tinker
        import zstandard
        from tinker.proto.request_conv import forward_backward_request_to_proto

        inputs = tinker.types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
        request = tinker.types.ForwardBackwardRequest(
            forward_backward_input=inputs, model_id=model, seq_id=seq
        )
        message = forward_backward_request_to_proto(request)
        if change is not None:
            change(message)
        body = message.SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        if compress:
            body = zstandard.ZstdCompressor().compress(body)
            headers["Content-Encoding"] = "zstd"
        reply = self.http.post("/forward_backward", content=body, headers=headers)
        return reply.raise_for_status().json()

    def optim_step(self, model: str, seq: int) -> dict:
        return self.post("/optim_step", model_id=model, seq_id=seq, adam_params={})

    def poll(self, promise: dict):
        return self.http.post("/retrieve_future", json={"request_id": promise["request_id"]})

    def result(self, promise: dict) -> dict:
        reply = self.poll(promise)
        assert reply.status_code == 200, reply.text
        protobuf = "protobuf" in reply.headers["content-type"]
        return {} if protobuf else reply.json()
