"""The table of peers: whose tests, at which revision, how they are run, and what does not pass.

A row's `known` names each test that does not pass, with a text that its failure must have and the
reason in a sentence. Its `changes` are texts of the copied files that are replaced by others; each
says why. A change that does not fit is an error: the checkout is of another revision.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


class AnotherRevision(Exception):
    """The checkout is not as the table knows it."""


@dataclass(frozen=True)
class Change:
    """A text of a copied file, and what stands there instead."""

    file: str  # in the names of the files that have it
    old: str
    new: str
    why: str

    def apply(self, place: Path, files: tuple[str, ...]) -> None:
        """Changes the files of a copy."""
        texts = {place / name: (place / name).read_text() for name in files if self.file in name}
        having = {file: text for file, text in texts.items() if self.old in text}
        if not having:
            raise AnotherRevision(f"{self.file} has no {self.old!r}, which is replaced: {self.why}")
        for file, text in having.items():
            file.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Known:
    """Why a test does not pass."""

    says: str  # is in what the failure says
    why: str


@dataclass(frozen=True)
class Suite:
    """Tests that share a server."""

    name: str
    files: tuple[str, ...]
    serves: Mapping[str, str]  # a model of models.py under each name that the tests ask for
    tests: int  # so many are run
    scripts: bool = False  # each file is a program, else pytest's
    arguments: tuple[str, ...] = ()  # of each program
    prints: str = ""  # what a program prints: each number found must be at most `most`
    most: float = 0.0
    beside: tuple[str, ...] = ()  # files that the others import
    changes: tuple[Change, ...] = ()
    plugin: str = ""  # pytest's, a module of ours
    data: bool = False  # the hub's data sets, of ours
    api_key: str | None = None  # that the server asks for
    left_out: tuple[str, ...] = ()  # tests that ask no server
    known: Mapping[str, Known] = field(default_factory=dict)

    def commands(self) -> list[tuple[str, ...]]:
        return [(file, *self.arguments) for file in self.files]


@dataclass(frozen=True)
class Peer:
    """A project."""

    name: str
    title: str
    repository: str
    revision: str  # that the table is of
    needs: str  # what pip installs beside the tests' own packages
    suites: tuple[Suite, ...]


# ---- SkyRL ----

SKYRL_API = "tests/tinker/test_api.py"
SKYRL_MODEL = "trl-internal-testing/tiny-Qwen3ForCausalLM"

SKYRL = Suite(
    name="server tests",
    files=(
        SKYRL_API,
        "tests/tinker/skyrl_train/test_multi_lora_megatron.py",
        "tests/tinker/skyrl_train/test_fsdp_tinker.py",
    ),
    beside=(
        "tests/__init__.py",
        "tests/tinker/__init__.py",
        "tests/tinker/conftest.py",
        "tests/tinker/skyrl_train/__init__.py",
    ),
    serves={SKYRL_MODEL: "random"},
    tests=25,
    plugin="tools.peers.skyrl",
    changes=(
        Change(
            SKYRL_API,
            "from skyrl.tinker.api import _build_uv_run_cmd_engine\n",
            "",
            "SkyRL is not installed; what asks for its command line is left out",
        ),
        Change(
            SKYRL_API,
            "from skyrl.tinker.config import EngineConfig\n",
            "EngineConfig = dict\n",
            "the same: its parameters are made when the file is read",
        ),
        Change(
            "test_multi_lora_megatron.py",
            "combined_loss, abs=1e-6",
            "combined_loss, rel=1e-6",
            "one call adds up in another order than three, and the loss, 65, is the sum of "
            "numbers whose last bits are 5e-7",
        ),
    ),
    left_out=(f"{SKYRL_API}::test_build_cmd_engine",),
    known={
        "test_api::test_training_workflow": Known(
            "DID NOT RAISE",
            "it expects load_state to be refused on a run that has trained; here it is done",
        ),
        "test_api::test_delete_checkpoint": Known(
            "weights/ckpt0",
            "it expects ids without the kind, `ckpt0` for `weights/ckpt0`, and SkyRL's files",
        ),
        "test_api::test_sample_prompt_logprobs": Known(
            "DID NOT RAISE",
            "it expects topk_prompt_logprobs to be refused, as SkyRL's JAX backend does",
        ),
        "test_api::test_stale_session_cleanup": Known(
            "Cleanup logs not found", "it reads SkyRL's own log"
        ),
        "test_multi_lora_megatron::test_rank_mismatch_rejected": Known(
            "DID NOT RAISE", "it expects a second rank on a server to be refused; here it is served"
        ),
        "test_multi_lora_megatron::test_sample_prompt_logprobs": Known(
            "asked for prompt logprobs",
            "it expects topk_prompt_logprobs alone to bring prompt_logprobs too, as vLLM does",
        ),
        "test_fsdp_tinker::test_second_adapter_rejected": Known(
            "DID NOT RAISE", "it expects a second adapter on a server to be refused"
        ),
    },
)

# ---- TuFT ----

TUFT_API = "tests/test_openai_api.py"
TUFT_IDS = Known(
    ":sample:", "TuFT puts its session into an answer's id; OpenAI's clients read none"
)

TUFT = Suite(
    name="OpenAI endpoints",
    files=(TUFT_API,),
    beside=("tests/__init__.py",),
    serves={"Qwen/Qwen3-0.6B": "demo"},
    tests=35,
    plugin="tools.peers.tuft",
    api_key="tml-test-key-1",
    changes=(
        Change(TUFT_API, "import ray\n", "", "its own server runs on Ray"),
        Change(
            TUFT_API,
            "from tuft.config import AppConfig, ModelConfig\n",
            "",
            "TuFT is not installed; these configure its own server",
        ),
        Change(
            TUFT_API,
            "from .helpers import _find_free_port, _log, _start_server, _stop_server, "
            "clear_ray_state\n",
            "_log = print\n",
            "the same; a test prints with the second",
        ),
        Change(
            TUFT_API,
            '@pytest.fixture(scope="module")\ndef oai_env(',
            "def their_server(",
            "the plugin has a fixture of this name, for the server that runs",
        ),
        Change(
            TUFT_API,
            'assert data["model"] == tinker_path\n            assert ":sample:" in data["id"]\n',
            'assert data["model"] == tinker_path\n',
            "TuFT's form of ids has rows of its own, and the whole flow would end here",
        ),
        Change(
            TUFT_API,
            'assert c["model"] == tinker_path\n                    assert ":sample:" in c["id"]\n',
            'assert c["model"] == tinker_path\n',
            "the same, of a stream",
        ),
    ),
    known={
        **dict.fromkeys(
            (
                "test_openai_api::TestCompletions::test_basic",
                "test_openai_api::TestCompletions::test_stream",
                "test_openai_api::TestChatCompletions::test_basic",
                "test_openai_api::TestChatCompletions::test_stream",
                "test_openai_api::TestResponseFormat::test_id_format",
            ),
            TUFT_IDS,
        ),
        "test_openai_api::TestAuth::test_invalid_key_403": Known(
            "401 == 403", "a wrong key is answered with 401, as OpenAI does"
        ),
        "test_openai_api::TestModels::test_models_per_user": Known(
            "401 == 200", "it has two users' keys; a server has one"
        ),
        "test_openai_api::TestTrainAndOAIIntegration::test_full_flow": Known(
            "KeyError: 'data'", "all runs until it asks with the second user's key"
        ),
        "test_openai_api::TestCompletions::test_presence_frequency_penalty": Known(
            "400 == 200", "penalties are refused by name"
        ),
    },
)

# ---- the cookbook ----

COOKBOOK = "thinking-machines-lab/tinker-cookbook"
COOKBOOK_REVISION = "9dfcc3a2"

TUTORIALS = Suite(
    name="tutorials",
    files=tuple(
        f"tutorials/{name}.py"
        for name in (
            "101_hello_tinker",
            "102_first_sft",
            "103_async_patterns",
            "104_first_rl",
            "201_rendering",
            "202_loss_functions",
            "203_completers",
            "204_weights",
            "205_evaluations",
            "301_cookbook_abstractions",
            "302_custom_environment",
            "303_sft_with_config",
            "304_rl_with_config",
            "401_sl_hyperparams",
            "402_rl_hyperparams",
            "403_dpo_preferences",
            "404_sequence_extension",
            "405_multi_agent",
            "406_prompt_distillation",
            "407_rlhf_pipeline",
            "501_export_hf",
            "502_lora_adapter",
            "503_publish_hub",
        )
    ),
    serves=dict.fromkeys(
        (
            "Qwen/Qwen3.5-9B-Base",
            "Qwen/Qwen3.5-4B",
            "Qwen/Qwen3.6-35B-A3B",
            "moonshotai/Kimi-K2.6",
        ),
        "demo",
    ),
    tests=23,
    scripts=True,
    data=True,
    changes=(
        Change(
            "tutorials/",
            "/tmp/tinker-tutorials",
            "tinker-tutorials",
            "a second run would resume the first one's from there, whose server is gone",
        ),
        *(
            Change("tutorials/407", old, new, "the tutorial's own sizes take hours on two cores")
            for old, new in (
                ("BATCH_SIZE = 256", "BATCH_SIZE = 16"),
                ("max_tokens=1024", "max_tokens=64"),
                ("max_steps=40,", "max_steps=2,"),
            )
        ),
    ),
    known=dict.fromkeys(
        ("204_weights", "501_export_hf", "502_lora_adapter"),
        Known(
            "Sampler checkpoints cannot be downloaded",
            "cookbook 0.6.1 downloads no checkpoint that was saved for sampling",
        ),
    ),
)

WEIGHTS = Suite(
    name="weights, a head of its own",
    files=(
        "tests/weights/test_lifecycle.py",
        "tests/weights/test_partial_lora_lifecycle.py",
        "tests/weights/test_weight_export_e2e.py",
    ),
    beside=("tests/__init__.py", "tests/weights/__init__.py", "tests/weights/conftest.py"),
    serves={
        "Qwen/Qwen3-8B": "untied",
        "Qwen/Qwen3.5-4B": "hybrid",
        "Qwen/Qwen3.6-35B-A3B": "mixture",
    },
    tests=12,
    data=True,
    changes=(
        Change(
            "tests/weights/",
            'optim_step_async({"learning_rate": 1e-4})',
            "optim_step_async(tinker.AdamParams(learning_rate=1e-4))",
            "the SDK takes no dictionary here",
        ),
        Change(
            "tests/weights/",
            "save_weights_for_sampler_async(",
            "save_weights_external_async(",
            "cookbook 0.6.1 downloads no checkpoint that was saved for sampling",
        ),
    ),
    left_out=("tests/weights/test_weight_export_e2e.py::TestDeepSeekFP8",),
)

TIED = dataclasses.replace(
    WEIGHTS,
    name="weights (tied), the embedding as head",
    serves={
        "Qwen/Qwen3-8B": "demo",
        "Qwen/Qwen3.5-4B": "hybrid-tied",
        "Qwen/Qwen3.6-35B-A3B": "mixture-tied",
    },
    known=dict.fromkeys(
        (
            "test_lifecycle::TestFullLifecycle::test_train_download_build",
            "test_weight_export_e2e::TestDenseQwen3::test_shard_merge",
            "test_weight_export_e2e::TestMoEQwen36::test_shard_merge",
            "test_weight_export_e2e::TestMoEQwen36::test_fp8_quantized_merge",
        ),
        Known("lm_head.weight", "the cookbook has no place for the head's adapter"),
    ),
)

LITELLM = Suite(
    name="litellm",
    files=("tests/third_party/test_litellm.py",),
    beside=("tests/__init__.py", "tests/third_party/__init__.py"),
    serves={"Qwen/Qwen3.5-4B": "demo"},
    tests=6,
)

INSPECT = Suite(
    name="inspect-ai",
    files=("tests/test_inspect_eval.py",),
    beside=("tests/__init__.py",),
    serves={"Qwen/Qwen3-8B": "demo", "Qwen/Qwen3.5-9B": "demo"},
    tests=4,
    known={
        "test_inspect_eval::test_thinking_model_include_reasoning": Known(
            "Expected ContentReasoning", "the demonstration's model never thinks"
        ),
    },
)

TEMPERATURE = Suite(
    name="validate_temperature_logprobs",
    files=("tests/validate_temperature_logprobs.py",),
    arguments=("base_model=Qwen/Qwen3-8B",),
    scripts=True,
    serves={"Qwen/Qwen3-8B": "demo"},
    tests=1,
    prints=r"^ +\d\.\d+ .* (\S+)$",
    most=1e-5,
)

COMPARISON = Suite(
    name="compare_sampling_training_logprobs",
    files=("tests/compare_sampling_training_logprobs.py",),
    scripts=True,
    serves={
        "Qwen/Qwen3-8B": "demo",
        "Qwen/Qwen3.5-4B": "hybrid",
        "Qwen/Qwen3.6-35B-A3B": "mixture",
    },
    tests=1,
    prints=r"'mse\[sample, train\]': ([^,]+),",
    most=1e-10,
    changes=(
        Change(
            "compare_sampling",
            "    response = httpx.get(url)\n    response.raise_for_status()\n"
            "    return response.text\n",
            "    del url\n    return open(torch.autograd.forward_ad.__file__).read()\n",
            "its text is a file of PyTorch's repository, which is installed too",
        ),
    ),
)

PEERS = (
    Peer(
        name="skyrl",
        title="SkyRL",
        repository="NovaSky-AI/SkyRL",
        revision="a9564572e",
        needs="nothing",
        suites=(SKYRL,),
    ),
    Peer(
        name="tuft",
        title="TuFT",
        repository="agentscope-ai/TuFT",
        revision="102eefd4c",
        needs="nothing",
        suites=(TUFT,),
    ),
    Peer(
        name="tutorials",
        title="The cookbook's tutorials",
        repository=COOKBOOK,
        revision=COOKBOOK_REVISION,
        needs="marimo matplotlib inspect-ai math-verify sympy pylatexenc",
        suites=(TUTORIALS,),
    ),
    Peer(
        name="cookbook-tests",
        title="The cookbook's tests of a server",
        repository=COOKBOOK,
        revision=COOKBOOK_REVISION,
        needs="litellm inspect-ai pytest-asyncio tabulate",
        suites=(LITELLM, INSPECT, TEMPERATURE, COMPARISON, WEIGHTS, TIED),
    ),
)
