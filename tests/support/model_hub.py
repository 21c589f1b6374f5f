"""A model hub on the loopback: what huggingface_hub asks of the real one, for a few small models.

It answers for models' files and revisions, for parts of files, and for who may read them, and can
break a connection in the middle of a file. What was asked is kept.
"""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "a" * 34


@dataclass
class Hub:
    """`models` has each model's revisions, and their files. `cuts` has where a file's connection
    breaks, each time that it is fetched."""

    url: str = ""
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    cuts: dict[str, list[int]] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # method, path, range
    sent: dict[str, int] = field(default_factory=dict)  # bytes of each file

    def add(self, model: str, files: Mapping[str, bytes], *revisions: str) -> str:
        """Puts files under a model's revisions, and under a commit, which is returned."""
        content = b"".join(name.encode() + b"\0" + files[name] for name in sorted(files))
        commit = hashlib.sha1(content).hexdigest()
        for revision in (commit, *(revisions or ("main",))):
            self.models.setdefault(model, {})[revision] = dict(files)
        return commit

    def commit(self, model: str, revision: str) -> str:
        """The commit of a revision."""
        revisions = self.models[model]
        found = (name for name in revisions if len(name) == 40)
        return next(name for name in found if revisions[name] == revisions[revision])

    def files_asked(self) -> set[str]:
        """The files that were fetched, in whole or in part."""
        return set(self.sent)


def files_of(folder: Path) -> dict[str, bytes]:
    """A model's folder as a repository."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


@contextmanager
def running() -> Iterator[Hub]:
    """A hub that runs."""
    hub = Hub()

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""

    def do_HEAD(self) -> None:
        """As GET, without the content."""
        self.do_GET()

    def do_GET(self) -> None:
        """Answers any request."""
        path = urlsplit(self.path).path
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        parts = [unquote(part) for part in path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        model = "/".join(parts[2:4] if api else parts[:2])
        rest = parts[4:] if api else parts[2:]
        revisions = self.hub.models.get(model)
        if revisions is None:
            return self._fail(401, "RepoNotFound", "Invalid username or password.")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in revisions:
            return self._fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files, commit = revisions[revision], self.hub.commit(model, revision)
        if not api:
            return self._file(model, commit, files, "/".join(rest[2:]))
        if rest[:1] == ["tree"]:
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                for name, data in files.items()
            ]
            return self._json(tree)
        siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
        return self._json({"id": model, "sha": commit, "siblings": siblings})

    def _file(self, model: str, commit: str, files: Mapping[str, bytes], name: str) -> None:
        if model in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._fail(401, "GatedRepo", f"Access to model {model} is restricted.")
        if name not in files:
            return self._fail(404, "EntryNotFound", "Entry not found")
        data, asked = files[name], self.headers.get("Range", "")
        start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{_etag(data)}"')
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Accept-Ranges", "bytes")
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cuts.get(name)
        stop = cuts.pop(0) if cuts else len(data)
        self.hub.sent[name] = self.hub.sent.get(name, 0) + max(0, min(stop, len(data)) - start)
        self.wfile.write(data[start:stop])
        if stop < len(data):
            self.wfile.flush()
            self.close_connection = True

    def _json(self, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _fail(self, status: int, code: str, message: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
