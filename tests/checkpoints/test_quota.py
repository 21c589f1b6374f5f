"""The limit of the bytes that checkpoints may take: what counts, who is refused, and that nothing
is deleted for it but what has expired where that was asked for."""

import os
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from conftest import Wire
from support.small_run import make_client, read, train
from test_checkpoint import adapter_of, meta_of, save
from tinsmith.checkpoints import checkpoint
from tinsmith.checkpoints.lora import Average
from tinsmith.checkpoints.quota import Quota, bytes_in
from tinsmith.checkpoints.store import Store
from tinsmith.server.backend import Backend
from tinsmith.server.service.config import ServerConfig

KEYS = tuple(str(pyrage.x25519.Identity.generate().to_public()) for _ in range(3))
SLACK = 40_000  # by which a save may ask for more than it takes


def write(file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))


def nothing() -> bool:
    return False


# ---- what counts ----


def test_a_file_with_several_names_counts_once(tmp_path: Path) -> None:
    one, two = tmp_path / "run/weights/one", tmp_path / "copy/weights/one"
    write(one / "a", 1000)
    write(two / "b", 10)
    os.link(one / "a", two / "a")
    (two / "link").symlink_to(one / "a")
    link = (two / "link").lstat().st_size
    assert bytes_in(tmp_path) == bytes_in(one.parent, two) == 1010 + link
    assert bytes_in(tmp_path / "nothing") == 0
    write(tmp_path / "state.sqlite", 5000)  # which is no checkpoint's
    quota = Quota(tmp_path, 2000, nothing)
    new = tmp_path / "run/weights/new"
    for place, most in (
        (new, 990 - link),
        (one, 990 - link),
        (two, 1000),
        (two / "b", 1000 - link),
    ):
        quota.check(most, place)
        with pytest.raises(OSError, match=r"1\.95 KiB \(--checkpoints-max\)"):
            quota.check(most + 1, place)


def test_the_refusal_has_the_sum_and_says_what_frees_room(tmp_path: Path) -> None:
    write(tmp_path / "run/weights/one/a", 3 << 20)
    with (
        pytest.raises(OSError) as caught,
        Quota(tmp_path, 4 << 20, nothing).reserve(2 << 20, tmp_path),
    ):
        raise AssertionError("it began to write")
    assert str(caught.value) == (
        f"nothing was written, because the checkpoints in {tmp_path} may take 4.00 MiB "
        "(--checkpoints-max): 3.00 MiB are kept, and this needs 2.00 MiB; `tinsmith prune` frees "
        "room, and so does deleting checkpoints through the server"
    )


def test_what_is_written_at_the_same_time_is_counted(tmp_path: Path) -> None:
    """The second looks when the first has ended."""
    quota, began, told = Quota(tmp_path, 1500, nothing), threading.Event(), []

    def second() -> None:
        began.wait()
        try:
            with quota.reserve(1000, tmp_path / "two"):
                write(tmp_path / "run/weights/two/a", 1000)
        except OSError as error:
            told.append(str(error))

    thread = threading.Thread(target=second)
    thread.start()
    with quota.reserve(1000, tmp_path / "one"):
        began.set()
        thread.join(0.2)
        write(tmp_path / "run/weights/one/a", 1000)
    thread.join()
    assert len(told) == 1 and "1000 bytes are kept" in told[0]
    assert bytes_in(tmp_path) == 1000


@pytest.mark.parametrize("keys", ((), KEYS[:1], KEYS))
@pytest.mark.parametrize("optimizer", (False, True))
def test_a_save_asks_for_no_less_than_it_takes(tmp_path, optimizer, keys) -> None:
    adapter, asked = adapter_of(), []
    adapter.write("m", np.full(adapter.size, 0.5, np.float32))
    average = Average(adapter.snapshot(), 0.5)

    def room(size: int, place: Path) -> Any:
        assert place == tmp_path / "a" and not any(tmp_path.iterdir())  # before the first byte
        asked.append(size)
        return checkpoint.anywhere(size, place)

    meta = meta_of(adapter, recipients=keys, user_metadata={"note": "é" * 5000})
    save(tmp_path / "a", adapter, meta, optimizer=optimizer, average=average, reserve=room)
    takes = bytes_in(tmp_path)
    assert takes <= asked[0] <= takes + SLACK + (30_000 if optimizer else 0) + 60_000


# ---- a server with a limit ----


def size_of_a_save(model: Path, folder: Path) -> int:
    with (
        Backend(
            ServerConfig({"tiny": model}, checkpoints=folder, device="cpu", threads=1)
        ) as backend,
        backend.service_client() as service,
    ):
        make_client(service).save_state("a").result()
    return bytes_in(*(path for path in folder.iterdir() if path.is_dir()))


@pytest.fixture(scope="module")
def size(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    return size_of_a_save(tiny_model_dir, tmp_path_factory.mktemp("size"))


@pytest.fixture
def limited(tiny_model_dir: Path, tmp_path: Path, size: int, request: Any) -> Iterator[Backend]:
    """A server with room for one training state, a second less than half."""
    options = {"checkpoints_max": size + size // 2, "device": "cpu", "threads": 1}
    options |= getattr(request, "param", {})
    with Backend(
        ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path / "kept", **options)
    ) as backend:
        yield backend


def kept(backend: Backend) -> int:
    return bytes_in(*(path for path in backend.checkpoints.iterdir() if path.is_dir()))


def test_a_save_that_would_pass_the_limit_is_refused_and_the_run_goes_on(limited, size) -> None:
    with limited.service_client() as service:
        client = make_client(service)
        first = client.save_state("first").result().path
        train(client, 1)
        before = kept(limited)
        with pytest.raises(tinker.RequestFailedError) as caught:
            client.save_state("second").result()
        told = str(caught.value)
        assert "(--checkpoints-max)" in told and "`tinsmith prune` frees room" in told
        assert re.search(r"[\d.]+ KiB are kept, and this needs [\d.]+ KiB", told), told
        assert kept(limited) == before and limited._service.store.checkpoints(client.model_id) == [
            first
        ]
        values = read(client)
        train(client, 1)  # nothing of the run is lost
        assert not np.array_equal(read(client), values)
        client.save_state("first", overwrite=True).result()  # it takes the old one's place
        assert abs(kept(limited) - before) < 1000
        rest = tinker.RestClient(base_url=limited.url, api_key="tml-local")
        rest.delete_checkpoint_from_tinker_path(first).result()
        second = client.save_state("second").result().path
        assert limited._service.store.checkpoints(client.model_id) == [second]


def test_copies_share_their_files_and_are_counted_so(limited, monkeypatch) -> None:
    monkeypatch.setenv("TINKER_PROJECT_ID", "any")  # the SDK wants one; there is none here
    with limited.service_client() as service:
        client = make_client(service)
        path, before = client.save_state("first").result().path, kept(limited)
        for _ in range(3):
            service.copy_weights(path).result()
        assert kept(limited) - before < 3 * 1000

        def no_link(*arguments: Any, **options: Any) -> None:
            raise OSError("this file system has no links")

        monkeypatch.setattr(os, "link", no_link)
        shared = kept(limited)
        with pytest.raises(tinker.BadRequestError, match="--checkpoints-max"):
            service.copy_weights(path).result()
        assert kept(limited) == shared


def test_an_upload_is_refused_before_its_files_are_kept(limited) -> None:
    wire = Wire(limited.url)
    lora = {"rank": 64, "train_attn": True, "train_mlp": True, "train_unembed": True}
    begun = wire.post("/external_weights_upload_start", base_model="tiny", lora_config=lora)
    before = kept(limited)
    body = bytes(limited._service.store.quota.most)
    reply = httpx.put(begun["urls"][checkpoint.ADAPTER_FILE], content=body)
    assert reply.status_code == 400 and "--checkpoints-max" in reply.json()["detail"]
    assert kept(limited) == before
    assert httpx.put(begun["urls"][checkpoint.CONFIG_FILE], content=b"{}").status_code == 200


@pytest.mark.parametrize("limited", [{"expire": True}, {"expire": False}], indirect=True)
def test_what_has_expired_makes_room_only_where_that_was_asked_for(limited) -> None:
    with limited.service_client() as service:
        client = make_client(service)
        old = client.save_state("old", ttl_seconds=3600).result().path
        store = Store(limited.checkpoints)
        hours = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
        store.update(old, created=hours)
        expires = limited._service.store.expire
        if not expires:
            with pytest.raises(tinker.RequestFailedError, match="--checkpoints-max"):
                client.save_state("new").result()
            assert store.checkpoints(client.model_id) == [old]
            return
        new = client.save_state("new").result().path
        assert store.checkpoints(client.model_id) == [new]
        with pytest.raises(tinker.RequestFailedError, match="--checkpoints-max"):
            client.save_state("another").result()
        assert store.checkpoints(client.model_id) == [new]  # which has not expired
