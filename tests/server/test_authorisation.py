"""Whom the server answers: foreign Hosts, Origins and content types, API keys, and where it may
listen. What a real browser sends is test_foreign_page.py's."""

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tinker
from conftest import Wire
from support.small_run import make_client, sample
from tinsmith.engine.errors import RequestError
from tinsmith.server.backend import Backend
from tinsmith.server.http import addresses
from tinsmith.server.http.authorisation import URL_SECONDS, Access, keys_in, keys_of
from tinsmith.server.service.config import ServerConfig

KEY = "tml-the-right-one"
LISTING = "/api/v1/training_runs"


def ask(server, headers: dict[str, str], path: str = LISTING) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers)


@pytest.mark.parametrize(
    ("headers", "sentence"),
    (
        ({"Host": "evil.example"}, "not known as evil.example; if that is its name, start it with"),
        ({"Host": "evil.example:80"}, "--allow-host NAME"),
        ({"Host": "localhost.evil.example"}, "not known as localhost.evil.example"),
        ({"Host": "127.0.0.1.evil.example"}, "not known as 127.0.0.1.evil.example"),
        ({"Host": "192.168.1.7"}, "not known as 192.168.1.7"),
        ({"Host": "[::1"}, "not known as"),
        ({"Host": ""}, "not known as"),
        ({"Origin": "http://evil.example"}, "web pages of http://evil.example may not use this"),
        ({"Origin": "http://localhost:1"}, "--allow-origin ORIGIN"),
        ({"Origin": "null"}, "web pages of null may not use this server"),
        ({"Sec-Fetch-Site": "cross-site"}, "a web page of another origin may not use this server"),
        ({"Sec-Fetch-Site": "same-site"}, "a web page of another origin may not use this server"),
    ),
)
@pytest.mark.parametrize("path", (LISTING, "/api/v1/healthz"))
def test_a_request_that_a_foreign_page_makes_is_refused(server, headers, sentence, path) -> None:
    reply = ask(server, headers, path)
    assert reply.status_code == 403 and sentence in reply.json()["detail"]
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize(
    "headers",
    (
        {"Host": "localhost:8000"},
        {"Host": "LOCALHOST."},
        {"Host": "127.8.8.8"},
        {"Host": "[::1]:8000"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin"},
    ),
)
def test_who_names_the_loopback_is_answered(server, headers: dict[str, str]) -> None:
    assert ask(server, headers).status_code == 200


@pytest.mark.parametrize("kind", ("text/plain", "Text/Plain;charset=UTF-8", "multipart/form-data"))
def test_a_post_that_needs_no_permission_of_a_browser_is_refused(server, kind: str) -> None:
    body = b'{"tags": [], "user_metadata": {}, "sdk_version": "0"}'
    url, headers = f"{server.url}/api/v1/create_session", {"Content-Type": kind}
    reply = httpx.post(url, content=body, headers=headers)
    assert reply.status_code == 415 and "must be application/json or protobuf" in reply.text
    for other in ("application/json", "application/x-www-form-urlencoded"):  # the second is curl's
        reply = httpx.post(url, content=body, headers={"Content-Type": other})
        assert reply.status_code == 200
    assert httpx.post(url, content=body).status_code == 200


def test_names_and_pages_that_are_allowed_are_answered() -> None:
    access = Access("127.0.0.1", frozenset({"gpu.example"}), frozenset({"https://lab.example"}))

    def refusal(**headers: str) -> tuple[int, str] | None:
        raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
        return access.refusal({"headers": raw, "path": LISTING, "scheme": "http", "method": "GET"})

    assert refusal(host="GPU.example:8000") is None
    assert refusal(host="gpu.example", origin="https://lab.example") is None
    assert refusal(host="gpu.example", origin="http://gpu.example") is None  # its own
    assert refusal(host="gpu.example", origin="http://lab.example") is not None
    assert refusal(host="lab.example") is not None
    for wrong in ("lab.example", "https://lab.example/", "*", "null"):
        with pytest.raises(RequestError, match="an allowed origin is like https://"):
            Access(origins=frozenset({wrong}))


def test_a_server_on_all_addresses_is_known_by_each_but_not_by_a_name() -> None:
    for host, other in (("0.0.0.0", "10.1.2.3"), ("::", "[fe80::1]")):
        access = Access(host, keys={KEY: 1.0})
        assert access._knows(f"{other}:8000") and access._knows("localhost")
        assert not access._knows("evil.example")


# ---- keys ----


@pytest.fixture(scope="module")
def locked(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    """A server with a key, and an allowed page."""
    with Backend(
        ServerConfig(
            {"tiny": tiny_model_dir},
            checkpoints=tmp_path_factory.mktemp("locked"),
            device="cpu",
            threads=1,
            api_key=KEY,
            allow_origins=["https://lab.example"],
        )
    ) as backend:
        yield backend


def test_without_the_key_there_is_nothing_but_health_and_the_pages_files(locked: Backend) -> None:
    assert ask(locked, {}, "/api/v1/healthz").json() == {"status": "ok"}
    assert ask(locked, {}, "/").status_code == ask(locked, {}, "/readyz").status_code == 200
    for headers in ({}, {"X-API-Key": "tml-local"}, {"X-API-Key": KEY + "x"}, {"X-API-Key": ""}):
        longer = f"{LISTING}/a/checkpoints/weights/healthz"
        for path in (LISTING, "/api/v1/nothing", longer, "/page/data/runs", "/metrics"):
            reply = ask(locked, headers, path)
            assert reply.status_code == 401 and "set TINKER_API_KEY" in reply.json()["detail"]
    assert ask(locked, {"X-API-Key": KEY}).status_code == 200
    with pytest.raises(tinker.AuthenticationError, match="needs the API key"):
        tinker.RestClient(base_url=locked.url, api_key="tml-other").list_training_runs().result()


def test_the_sdk_works_with_the_key_and_downloads_by_signed_urls(locked: Backend) -> None:
    with locked.service_client() as service:
        client = make_client(service)
        assert len(sample(client.save_weights_and_get_sampling_client().result())) > 0
        path = client.save_weights_for_sampler("kept").result().path
        rest = tinker.RestClient(base_url=locked.url, api_key=KEY)
        external = Wire(locked.url, key=KEY)
        run, kind, name = path.removeprefix("tinker://").rsplit("/", 2)
        place = f"/training_runs/{run}/checkpoints/{kind}/{name}/archive"
        archive = external.http.get(place).headers["location"]
        saved = external.post(
            "/save_weights_external", model_id=client.model_id, seq_id=3, path="out"
        )
        assert "error" not in external.result(saved)
        there = f"tinker://{client.model_id}/external_weights/out"
        urls = rest.get_external_weights_urls(there).result().urls
    for url in (archive, *urls.values()):
        with urllib.request.urlopen(url) as reply:
            assert len(reply.read()) > 100
        for bad in (
            url.partition("?")[0],
            url[:-1] + ("0" if url[-1] != "0" else "1"),
            re.sub(r"expires=\d+", "expires=99999999999", url),
            url.replace("/out/", "/kept/").replace("sampler_weights/kept", "weights/kept"),
        ):
            assert httpx.get(bad).status_code == 401, bad
        assert httpx.delete(url).status_code == 401


def test_a_signature_ends_after_a_day(monkeypatch) -> None:
    access, path = (
        Access(keys={KEY: 1.0}),
        "/api/v1/training_runs/a/checkpoints/weights/b/archive.tar",
    )
    query = access.signed(f"http://localhost{path}").partition("?")[2].encode()
    scope = {"headers": [], "method": "GET", "path": path, "query_string": query}
    assert access._has_key(scope)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + URL_SECONDS)
    assert not access._has_key(scope)


def test_a_page_that_is_allowed_may_ask_with_the_key(locked: Backend) -> None:
    origin = {"Origin": "https://lab.example"}
    asked = {"Access-Control-Request-Method": "GET", "Access-Control-Request-Headers": "x-api-key"}
    reply = httpx.options(f"{locked.url}{LISTING}", headers=origin | asked)
    assert reply.status_code == 200 and "x-api-key" in reply.headers["access-control-allow-headers"]
    assert ask(locked, origin).status_code == 401
    reply = ask(locked, origin | {"X-API-Key": KEY})
    assert reply.headers["access-control-allow-origin"] == "https://lab.example"
    reply = httpx.options(f"{locked.url}{LISTING}", headers=asked | {"Origin": "http://a.example"})
    assert reply.status_code == 403


@pytest.mark.parametrize("key", ("", "secret", "tml-", "tml-äöüäöüäöü", "tml-a b c d e f"))
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(RequestError, match="the API key must begin with 'tml-'"):
        Access(keys={key: 1.0})


def others() -> list[str]:
    """The machine's addresses but the loopback's, as the kernel's table of routes has them."""
    table = Path("/proc/net/fib_trie").read_text()
    found = set(re.findall(r"\|-- ([\d.]+)\n +/32 host LOCAL", table))
    return sorted(address for address in found if not address.startswith("127."))


def test_a_server_on_all_addresses_is_at_each_of_the_machines() -> None:
    for host, own in (("127.0.0.1", "http://127.0.0.1:8000"), ("::1", "http://[::1]:8000")):
        assert addresses.reached(host, own) == [own] == [addresses.url(host, 8000)]
    wanted = [f"http://{address}:8000" for address in others()] or ["http://0.0.0.0:8000"]
    found = addresses.reached("0.0.0.0", "http://0.0.0.0:8000")  # an interface's first one
    assert found and set(found) <= set(wanted)


def test_another_address_than_the_loopback_needs_a_key(tiny_model_dir, tmp_path) -> None:
    models = {"tiny": tiny_model_dir}
    for host in ("0.0.0.0", "::"):
        with pytest.raises(RequestError, match="without an API key: whoever reaches it could"):
            Backend(ServerConfig(models, checkpoints=tmp_path, host=host))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "key").write_text(f"{KEY}\n")
    command = [
        sys.executable, "-m", "tinsmith.cli", "serve", f"tiny={tiny_model_dir}", "--port", "0",
        "--device", "cpu", "--threads", "1", "--host", "0.0.0.0",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1 and "give it one with --api-key-file FILE" in done.stderr
    process = subprocess.Popen(
        [*command, "--api-key-file", "key"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    with process.stdout:
        told = ""
        while "TINKER_API_KEY" not in told and (line := process.stdout.readline()):
            told += line
        urls = re.findall(r"http://[^\s]+:\d+", told)
        assert KEY not in told and "TINKER_API_KEY=(the server's key)" in told
        for url in urls:  # those of the machine, at which others reach it
            url = url.replace("0.0.0.0", "127.0.0.1")  # of a machine without a network
            assert httpx.get(f"{url}{LISTING}").status_code == 401
            assert httpx.get(f"{url}{LISTING}", headers={"X-API-Key": KEY}).status_code == 200
        assert ("0.0.0.0" in told) == ("--allow-host NAME" not in told) == (not others())
        process.terminate()
        assert process.wait(timeout=60) == 0


# ---- several keys ----


def test_each_of_several_keys_is_a_client_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    keys = {"tml-of-the-first": 1.0, "tml-of-the-second": 3.0}
    config = ServerConfig({"tiny": tiny_model_dir}, checkpoints=tmp_path / "c", api_key=keys)
    with Backend(config) as backend:
        for key, status in (*((key, 200) for key in keys), ("tml-of-nobody", 401), ("", 401)):
            assert ask(backend, {"X-API-Key": key}).status_code == status
        wires = {key: Wire(backend.url, key) for key in keys}
        runs = {key: wire.create("tiny") for key, wire in wires.items()}
        for key, wire in wires.items():
            for other, run in runs.items():
                told = wire.http.post("/get_info", json={"model_id": run}).status_code
                assert told == (200 if other == key else 404)


def test_keys_in_a_file() -> None:
    text = "# the lab\ntml-of-the-first\n\n  tml-of-the-second   2.5 # the robot\n"
    assert keys_in(text) == {"tml-of-the-first": 1.0, "tml-of-the-second": 2.5}
    assert keys_in("tml-alone\n") == keys_of("tml-alone") == {"tml-alone": 1.0}
    assert keys_of(None) == {} and keys_of({"a": 2}) == {"a": 2.0}
    for wrong, sentence in (
        ("tml-a 1 2", "line 1 of the API keys should be a key, or a key and its weight"),
        ("tml-a\ntml-b heavy", "line 2 of the API keys"),
        ("# nobody", "the file of API keys has none"),
    ):
        with pytest.raises(ValueError, match=sentence):
            keys_in(wrong)
    for weight in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(RequestError, match=r"weight is from 0\.001 to 1000"):
            Access(keys={KEY: weight})
