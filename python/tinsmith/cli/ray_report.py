"""`tinsmith doctor --ray`: what a Ray cluster has, and whether its nodes can be replicas.

Each node runs a task, which needs no free CPU there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tinsmith import _core
from tinsmith.replicas import cluster, identity
from tinsmith.system.format import counted
from tinsmith.system.home import cache_folder

ANSWER_SECONDS = 60.0  # in which a node must answer; it may have to start a process
HEAD = "node:__internal_head__"  # a resource of the head's


def lines(address: str) -> Iterator[str]:
    """The report."""
    joined = cluster.join(address)
    try:
        rows = cluster.nodes()
        yield (
            f"ray {ray.__version__}: {counted(len(rows), 'node')}, "
            f"{cluster.shown(ray.cluster_resources())}; a token is {_token()}"
        )
        own = facts()
        ask = ray.remote(num_cpus=0, max_retries=0)(facts)
        asked = [
            ask.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(row["NodeID"], soft=False)
            ).remote()
            for row in rows
        ]
        for row, answer in zip(rows, asked, strict=True):
            has = row["Resources"]
            told = _told(answer, own, head=HEAD in has)
            yield f"  {row['NodeManagerHostname']}: {cluster.shown(has)}; {told}"
    finally:
        if joined:
            ray.shutdown()


def facts() -> dict[str, str]:
    """What replicas on this machine would be made of, and its models."""
    models = {path.name for path in cache_folder().glob("models--*")}
    return {
        "code": identity.code(),
        "instruction set": _core.computes_with("cpu"),
        "models": ", ".join(sorted(name[8:].replace("--", "/") for name in models)) or "no models",
        "notices": f"{lost_seconds():.0f} s",
    }


def lost_seconds() -> float:
    """After how long the head notices a cut cable, if this is a process of its node: those have its
    settings."""
    config = ray._raylet.Config
    wait_ms = config.health_check_period_ms() + config.health_check_timeout_ms()
    return float(config.health_check_failure_threshold() * wait_ms / 1000)


def _told(answer: Any, own: dict[str, str], *, head: bool = False) -> str:
    """A node's answer, compared with this machine's facts."""
    try:
        found = ray.get(answer, timeout=ANSWER_SECONDS)
    except Exception as error:
        last = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        return f"it can't run tinsmith: {last[0][:300]}"
    compared = [
        f"the same {name}" if found[name] == own[name] else f"another {name}, {found[name]}"
        for name in ("code", "instruction set")
    ]
    notices = f"; as the head it notices a cut cable within {found['notices']}" if head else ""
    return f"{', '.join(compared)}; {found['models']} in its Hugging Face cache{notices}"


def _token() -> str:
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    if is_token_auth_enabled():
        return "used"
    return f"not used: who reaches its ports can run code ({cluster.TOKEN})"
