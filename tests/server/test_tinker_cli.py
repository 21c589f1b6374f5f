"""The SDK's command line, `tinker …`, on this server: each of its subcommands."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import tinker
from click.testing import CliRunner
from conftest import make_datum, sdk_asks
from huggingface_hub import HfApi
from safetensors.numpy import load_file
from tinker.cli.__main__ import main_cli
from tinker.cli.exceptions import TinkerCliError


@pytest.fixture(autouse=True)
def environment(server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sdk_asks(server.url, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def paths(service_client) -> dict[str, str]:
    """A run's checkpoints by their kind."""
    run = service_client.create_lora_training_client("tiny", rank=4, seed=1).result()
    run.forward_backward([make_datum([11, 12], [12, 13], weights=[1, 1])], "cross_entropy")
    run.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    return {
        "run": run.model_id,
        "weights": run.save_state("one").result().path,
        "sampler": run.save_weights_for_sampler("two").result().path,
        "external": run.save_weights_external("three").result().path,
    }


def tell(*arguments: str, given: str = "") -> str:
    """What the command prints."""
    ended = CliRunner().invoke(main_cli, arguments, input=given)
    if ended.exception is not None and not isinstance(ended.exception, SystemExit):
        raise ended.exception
    assert ended.exit_code == 0, ended.output
    return ended.output


def shown(*arguments: str) -> Any:
    """The same as JSON."""
    return json.loads(tell("--format", "json", *arguments))


def refused(*arguments: str, given: str = "") -> str:
    """The sentences of its error."""
    with pytest.raises(TinkerCliError) as told:
        tell(*arguments, given=given)
    return f"{told.value.message}; {told.value.details}"


def run_list(paths: dict[str, str], folder: Path) -> None:
    assert shown("run", "list", "--limit", "0")["runs"][0]["training_run_id"] == paths["run"]
    table = tell("run", "list", "-c", "id,model,owner,lora,updated,status,checkpoint")
    row = next(line for line in table.splitlines() if paths["run"] in line)
    for part in ("tiny", "local", "Rank 4", "OK", "weights/one"):
        assert part in row, row


def run_info(paths: dict[str, str], folder: Path) -> None:
    found = shown("run", "info", paths["run"])
    assert (found["base_model"], found["lora_rank"]) == ("tiny", 4)
    assert found["last_sampler_checkpoint"]["tinker_path"] == paths["sampler"]
    assert paths["weights"] in tell("run", "info", paths["run"])
    assert "there is no training run" in refused("run", "info", "absent")


def checkpoint_list(paths: dict[str, str], folder: Path) -> None:
    found = shown("checkpoint", "list", "--run-id", paths["run"])["checkpoints"]
    kinds = {item["tinker_path"]: item["checkpoint_type"] for item in found}
    assert kinds == {
        paths["weights"]: "training",
        paths["sampler"]: "sampler",
        paths["external"]: "external",
    }
    everything = shown("checkpoint", "list", "--limit", "0")["checkpoints"]
    assert set(kinds) <= {item["tinker_path"] for item in everything}
    assert paths["sampler"] in tell("checkpoint", "list", "--run-id", paths["run"])


def checkpoint_info(paths: dict[str, str], folder: Path) -> None:
    found = shown("checkpoint", "info", paths["weights"])
    assert (found["size_bytes"] > 0, found["lora_rank"], found["public"]) == (True, 4, False)


def checkpoint_publish(paths: dict[str, str], folder: Path) -> None:
    tell("checkpoint", "publish", paths["weights"])
    assert shown("checkpoint", "info", paths["weights"])["public"]


def checkpoint_unpublish(paths: dict[str, str], folder: Path) -> None:
    tell("checkpoint", "publish", paths["weights"])
    tell("checkpoint", "unpublish", paths["weights"])
    assert not shown("checkpoint", "info", paths["weights"])["public"]


def checkpoint_set_ttl(paths: dict[str, str], folder: Path) -> None:
    tell("checkpoint", "set-ttl", paths["weights"], "--ttl", "7200")
    assert "in 1 hour" in tell("checkpoint", "info", paths["weights"])
    tell("checkpoint", "set-ttl", paths["weights"], "--remove")
    assert shown("checkpoint", "info", paths["weights"])["expires_at"] is None
    assert "from 3600" in refused("checkpoint", "set-ttl", paths["weights"], "--ttl", "1")


def checkpoint_delete(paths: dict[str, str], folder: Path) -> None:
    assert "cancelled" in tell("checkpoint", "delete", paths["weights"], given="n\n")
    assert shown("checkpoint", "delete", paths["weights"], "-y")["deleted_count"] == 1
    run = ("--run-id", paths["run"])
    tell("checkpoint", "delete", *run, "--type", "sampler_weights", "--yes")
    left = shown("checkpoint", "list", *run)["checkpoints"]
    assert [item["tinker_path"] for item in left] == [paths["external"]]
    tell("checkpoint", "delete", *run, "--after", "2020-01-01", given="y\n")
    assert shown("checkpoint", "list", *run)["checkpoints"] == []


def checkpoint_download(paths: dict[str, str], folder: Path) -> None:
    """A training checkpoint goes through a run that is loaded from it, and is exported."""
    found = []
    for kind in ("external", "weights"):
        where = shown("checkpoint", "download", paths[kind], "-o", "down")["destination"]
        found.append(load_file(Path(where) / "adapter_model.safetensors"))
        assert json.loads((Path(where) / "adapter_config.json").read_text())["r"] == 4
    one, other = found
    assert one.keys() == other.keys() and all((one[k] == other[k]).all() for k in one)
    tell("checkpoint", "download", paths["weights"], "-o", "down", "--force")
    assert "cannot be downloaded" in refused("checkpoint", "download", paths["sampler"])


def checkpoint_push_hf(paths: dict[str, str], folder: Path) -> None:
    """Without the hub's side of it."""
    push = ("checkpoint", "push-hf", paths["weights"], "--repo", "me/mine")
    assert "hf auth login" in refused(*push)
    pushed: dict[str, bytes] = {}

    def upload(_: HfApi, *, folder_path: str, **__: Any) -> None:
        pushed.update((file.name, file.read_bytes()) for file in Path(folder_path).iterdir())

    with pytest.MonkeyPatch.context() as hub:
        hub.setattr(HfApi, "whoami", lambda _: {"name": "me"})
        hub.setattr(HfApi, "create_repo", lambda _, **__: None)
        hub.setattr(HfApi, "upload_folder", upload)
        assert "me/mine" in tell(*push)
    where = shown("checkpoint", "download", paths["external"], "-o", "down")["destination"]
    wanted = (Path(where) / "adapter_model.safetensors").read_bytes()
    assert pushed["adapter_model.safetensors"] == wanted
    assert json.loads(pushed["adapter_config.json"])["r"] == 4
    card = pushed["README.md"].decode()
    for part in (paths["weights"], "base_model: tiny", "LoRA rank: 4", "attn=True, mlp=True"):
        assert part in card


def model_list(paths: dict[str, str], folder: Path) -> None:
    (found,) = shown("model", "list")["models"]
    assert found == {
        "model_name": "tiny",
        "max_context_length": 128,
        "trainable": True,
        "sampleable": True,
    }
    assert "tiny" in tell("model", "list", "TIN")


def session_export_trace(paths: dict[str, str], folder: Path) -> None:
    session = paths["run"].partition(":")[0]
    tell("session", "export-trace", session)
    trace = json.loads((folder / f"{session}.pftrace").read_text())
    names = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"create", "forward_backward", "optim_step", "queued", "work"} <= names
    told = shown("session", "export-trace", session, "-o", "mine/trace.json")
    assert told["file_size_bytes"] == (folder / "mine/trace.json").stat().st_size
    url = shown("session", "export-trace", session, "--url-only")["url"]
    assert f"/sessions/{session}/trace/" in url
    assert "there is no session" in refused("session", "export-trace", "absent")


def auth_status(paths: dict[str, str], folder: Path) -> None:
    assert "Tinker accessible: yes" in tell("auth", "status")


def auth_whoami(paths: dict[str, str], folder: Path) -> None:
    assert "the credential is a plain API key" in refused("auth", "whoami")


def auth_login(paths: dict[str, str], folder: Path) -> None:
    told = refused("auth", "login", given="tml-somebody\n")
    assert "set TINKER_API_KEY instead" in told and not (folder / "home").exists()


def auth_logout(paths: dict[str, str], folder: Path) -> None:
    assert "nothing to log out from" in refused("auth", "logout")


def billing_usage(paths: dict[str, str], folder: Path) -> None:
    hours = "2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z"
    assert "billing is not built in tinsmith" in refused("billing", "usage", *hours)


def billing_checkpoint_storage(paths: dict[str, str], folder: Path) -> None:
    assert "billing is not built in tinsmith" in refused("billing", "checkpoint-storage")


def version(paths: dict[str, str], folder: Path) -> None:
    assert tell("version").startswith("tinker 0.")


COMMANDS: dict[str, Callable[[dict[str, str], Path], None]] = {
    "run list": run_list,
    "run info": run_info,
    "checkpoint list": checkpoint_list,
    "checkpoint info": checkpoint_info,
    "checkpoint publish": checkpoint_publish,
    "checkpoint unpublish": checkpoint_unpublish,
    "checkpoint set-ttl": checkpoint_set_ttl,
    "checkpoint delete": checkpoint_delete,
    "checkpoint download": checkpoint_download,
    "checkpoint push-hf": checkpoint_push_hf,
    "model list": model_list,
    "session export-trace": session_export_trace,
    "auth status": auth_status,
    "auth whoami": auth_whoami,
    "auth login": auth_login,
    "auth logout": auth_logout,
    "billing usage": billing_usage,
    "billing checkpoint-storage": billing_checkpoint_storage,
    "version": version,
}


def subcommands(command: click.Command, name: str = "") -> Iterator[str]:
    """The names of a command's leaves."""
    if not isinstance(command, click.Group):
        yield name
        return
    context = click.Context(command)
    for part in command.list_commands(context):
        inner = command.get_command(context, part)
        assert inner is not None
        yield from subcommands(inner, f"{name} {part}".strip())


@pytest.mark.parametrize("command", tuple(subcommands(main_cli)))
def test_the_sdks_command_line_works_on_this_server(
    command: str, paths: dict[str, str], tmp_path: Path
) -> None:
    COMMANDS[command](paths, tmp_path)  # a new one needs a test
