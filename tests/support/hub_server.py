"""As much of the Hugging Face hub as its client needs to read a data set: revisions, the list of files, the files."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class HubServer:
    """A hub with one data set, whose revisions are names of commits."""

    endpoint_url: str
    name: str
    revisions: Mapping[str, str]
    files: Mapping[str, bytes]
    sent: list[str] = field(default_factory=list)
    """Files whose content was asked for."""


@contextlib.contextmanager
def running(
    name: str, revisions: Mapping[str, str], files: Mapping[str, bytes]
) -> Iterator[HubServer]:
    """Start the hub, stop it at the end."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.hub = HubServer(f"http://127.0.0.1:{server.server_address[1]}", name, revisions, files)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def _handle(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        api, files = f"/api/datasets/{hub.name}/", f"/datasets/{hub.name}/resolve/"
        kind, _, rest = path.removeprefix(api).partition("/")
        if path.startswith(files):
            revision, _, name = path.removeprefix(files).partition("/")
            self._file(hub.revisions.get(revision), name)
        elif path.startswith(api) and kind in {"revision", "tree"} and rest in hub.revisions:
            self._json(self._info(rest) if kind == "revision" else self._tree())
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD = _handle

    def _info(self, revision: str) -> object:
        hub = self.server.hub
        siblings = [{"rfilename": name} for name in hub.files]
        return {"id": hub.name, "sha": hub.revisions[revision], "siblings": siblings}

    def _tree(self) -> object:
        return [
            {
                "type": "file",
                "path": name,
                "size": len(data),
                "oid": hashlib.sha1(data).hexdigest(),  # noqa: S324 - git's
            }
            for name, data in self.server.hub.files.items()
        ]

    def _file(self, commit: str | None, name: str) -> None:
        data = self.server.hub.files.get(name)
        if commit is None or data is None:
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.server.hub.sent.append(name)
        tag = hashlib.sha1(data).hexdigest()  # noqa: S324
        self._answer(200, data, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
