"""pytest's plugin for TuFT's tests of OpenAI's endpoints: the server that runs, in place of one
that they would start."""

import os
from types import SimpleNamespace

import pytest


@pytest.fixture(scope="module")
def oai_env() -> SimpleNamespace:
    return SimpleNamespace(url=os.environ["TINKER_BASE_URL"], model_name="Qwen/Qwen3-0.6B")
