"""A web page of another origin in a real browser (Chromium, headless), and what it tries on a
server: to list, download, create, publish and delete. test_foreign_page.py asks for it."""

import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import quote

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
REASON = "no chromium: apt-get install chromium"
NAME = "evil.example"  # whose address the browser is told to be this machine's

PAGE = """<!doctype html><title>harmless</title><script>
const steps = JSON.parse(decodeURIComponent('%s'));
const told = {};
function element(kind, url) {
  const made = document.createElement(kind);
  made.src = url; document.body.append(made);
  return new Promise(done => {
    made.onload = () => done('sent'); made.onerror = () => done('failed: error');
  });
}
const kinds = {
  async fetch({url, how, blob}) {
    if (blob) how.body = new Blob([how.body]);
    const reply = await fetch(url, how);
    return reply.status + await reply.text();
  },
  form({url, how}) {  // posts without asking, and opens the answer in a frame
    const [frame, made, field] = ['iframe', 'form', 'input'].map(x => document.createElement(x));
    frame.name = 'frame' + Math.random();
    Object.assign(made, {method: 'POST', action: url, target: frame.name, enctype: how.type});
    Object.assign(field, {name: how.body.slice(0, -1) + ', "x": "', value: '"}'});
    made.append(field); document.body.append(frame, made);
    return new Promise(done => { frame.onload = () => done('sent'); made.submit(); });
  },
  beacon: ({url, how}) => navigator.sendBeacon(url, how.body) && 'sent',
  script: ({url}) => element('script', url),
  img: ({url}) => element('img', url),
  iframe: ({url}) => element('iframe', url),
  socket: ({url}) => new Promise(done => {
    const made = new WebSocket(url.replace('http', 'ws'));
    made.onopen = () => done('opened'); made.onerror = () => done('failed: error');
  }),
};
onload = async () => {
  for (const step of steps) {
    try { told[step.name] = String(await kinds[step.kind](step)).slice(0, 400); }
    catch (error) { told[step.name] = 'failed: ' + error; }
  }
  await fetch('/report', {method: 'POST', body: JSON.stringify(told)});
};
</script><body></body>"""
EMPTY = ("0", "sent")  # what a page sees of an answer that it can't read, beside a failure


class Page:
    """A page that is served; `told` is what it reported, once `come` is set."""

    def __init__(self, port: int):
        self.url = f"http://localhost:{port}"
        self.text = ""
        self.told: dict[str, str] = {}
        self.come = threading.Event()


@contextmanager
def page() -> Iterator[Page]:
    """Serves a page at an origin of its own."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(served.text.encode())

        def do_POST(self) -> None:
            served.told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()
            served.come.set()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Page(server.server_port)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def visit(url: str, *, seconds: float, until: threading.Event | None = None) -> str:
    """Opens a URL in the browser, until it is shown or an event is set; returns the document."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory() as folder:
        command = [
            BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", f"--user-data-dir={folder}",
            f"--host-resolver-rules=MAP {NAME} 127.0.0.1",
            *(["--remote-debugging-port=0"] if until else ["--dump-dom"]), url,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            if until is not None:
                until.wait(seconds)
                process.terminate()
            return process.communicate(timeout=seconds)[0]
        finally:
            process.kill()
            process.wait()


def try_all(served: Page, steps: list[dict[str, Any]], seconds: float) -> dict[str, str]:
    """Lets the page try steps; what it saw of each, by the steps' names."""
    served.text = PAGE % quote(json.dumps(steps))
    served.come.clear()
    visit(served.url, seconds=seconds, until=served.come)
    assert served.come.is_set(), "the page did not run"
    return served.told


def everything(name: str, url: str, path: str) -> list[dict[str, Any]]:
    """Steps that list, download, create, publish and delete, on a server and a checkpoint of it."""
    api, session = f"{url}/api/v1", '{"tags": ["page"], "user_metadata": {}}'

    def step(what: str, kind: str, path: str, **how: Any) -> dict[str, Any]:
        made = {"name": f"{name} {what}", "kind": kind, "url": f"{api}{path}"}
        return made | {"blob": how.pop("blob", False), "how": how}

    def post(what: str, kind: str = "fetch", **how: Any) -> dict[str, Any]:
        return step(what, kind, "/create_session", method="POST", body=session, **how)

    return [
        step("list", "fetch", "/training_runs"),
        step("list blindly", "fetch", "/training_runs", mode="no-cors"),
        step("download", "fetch", f"{path}/archive.tar"),
        step("script", "script", "/training_runs"),
        step("image", "img", f"{path}/archive.tar"),
        step("frame", "iframe", "/training_runs"),
        step("socket", "socket", "/healthz"),
        post("text", headers={"Content-Type": "text/plain"}, mode="no-cors"),
        post("json", headers={"Content-Type": "application/json"}),
        post("blob", mode="no-cors", blob=True),
        post("beacon", "beacon"),
        post("form", "form", type="text/plain"),
        post("other form", "form", type="multipart/form-data"),
        step("publish", "fetch", f"{path}/publish", method="POST", mode="no-cors"),
        step("delete", "fetch", path, method="DELETE"),
    ]
