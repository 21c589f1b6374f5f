"""A checkpoint's files as HTTP clients fetch them."""

import gc
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import tinker
from support.waiting import until
from tinsmith.server.routes import transfers

KIND = "external_weights"


@pytest.fixture
def urls(service_client: tinker.ServiceClient, server) -> list[str]:
    """Of the files of a checkpoint, and of its tar."""
    run = service_client.create_lora_training_client("tiny", rank=4).result()
    path = run.save_weights_external("out").result().path
    rest = tinker.RestClient(base_url=server.url, api_key="tml-local")
    found = rest.get_external_weights_urls(path).result().urls
    tar = f"{server.url}/api/v1/training_runs/{run.model_id}/checkpoints/external_weights/out"
    return [*found.values(), f"{tar}/archive.tar"]


def test_files_are_fetched_one_after_the_other_on_one_connection(urls: list[str]) -> None:
    with httpx.Client() as client:
        wanted = [client.get(url).content for url in urls]
        for _ in range(60):
            for url, content in zip(urls, wanted, strict=True):
                assert client.get(url).content == content
                assert client.head(url).status_code in (200, 405)


def opened(folder: Path) -> list[Path]:
    """The checkpoints' files in a folder that this process, which is the server too, has open."""
    found: list[Path] = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(link.readlink())
        except OSError:  # closed meanwhile
            continue
    return [path for path in found if path.is_relative_to(folder.resolve()) and KIND in path.parts]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_what_is_cut_off_leaves_no_file_open(
    which: int, urls: list[str], server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "PIECE", 100)
    place = urlsplit(urls[which])
    target = place.path + (f"?{place.query}" if place.query else "")
    head = f"GET {target} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode()
    gc.collect()
    gc.disable()  # which would close them, some time
    try:
        for _ in range(20):
            with socket.create_connection((place.hostname, place.port)) as client:
                client.sendall(head)
        with httpx.Client() as client:  # and one that was not cut off
            assert client.get(urls[which]).status_code == 200
        until(lambda: not opened(Path(server.checkpoints)))
    finally:
        gc.enable()
