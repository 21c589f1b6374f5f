"""Writes a server's database as SQL: run with an older tinsmith, it makes the copies that lie here.

    git archive COMMIT | tar -x -C OLD && (cd OLD && python setup.py build_ext --inplace)
    PYTHONPATH=OLD/python python tests/server/databases/make.py MODEL >
    tests/server/databases/COMMIT.sql

A server has two clients: one trains, saves, samples and ends; the other is there when the server
stops. The names of the copies are the commits that made them: 4ba09b3 is the first with a database,
ee11e36 the last before the history of runs, 00b24dd the first with it, 35a2453 the last that wrote
version 1, bd00a10 the last that wrote version 2.
"""

import sqlite3
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np
import tinker
import tinsmith

TOKENS, TARGETS = [11, 12, 13, 14], np.array([12, 13, 14, 15])


def use(backend: "tinsmith.serve") -> None:
    """What the clients do."""
    about = {"user_metadata": {"who": "me", "note": "größer 🙂"}, "display_name": "red bird"}
    with backend.service_client(**about) as service:
        run = service.create_lora_training_client(
            "tiny", rank=4, seed=1, user_metadata={"renderer_name": "qwen3"}
        ).result()
        weights = np.ones(len(TARGETS), np.float32)
        inputs = {"target_tokens": TARGETS, "weights": weights}
        datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS), loss_fn_inputs=inputs)
        for _ in range(3):
            run.forward_backward([datum], "cross_entropy")
            run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
        run.save_state("a", ttl_seconds=7200).result()
        path = run.save_weights_for_sampler("b").result().path
        sampler = service.create_sampling_client(model_path=path).result()
        sampler.sample(
            tinker.ModelInput.from_ints(TOKENS), 2, tinker.SamplingParams(max_tokens=4, seed=1)
        ).result()
        rest = tinker.RestClient(base_url=backend.url, api_key="tml-local")
        assert len(rest.list_checkpoints(run.model_id).result().checkpoints) == 2
    other = backend.service_client(user_metadata={"who": "you"})
    other.create_lora_training_client("tiny", rank=2).result()


def main() -> None:
    """See the file's header."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"checkpoints": folder, "device": "cpu", "threads": 1}
        with tinsmith.serve({"tiny": sys.argv[1]}, **options) as backend:
            use(backend)
        with closing(sqlite3.connect(Path(folder) / "state.sqlite")) as sql:
            (version,) = sql.execute("PRAGMA user_version").fetchone()
            print("\n".join(sql.iterdump()))
            print(f"PRAGMA user_version = {version};")


main()
