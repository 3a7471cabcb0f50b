"""An HTTP proxy on loopback that breaks what it is told to break on the way to a real S3 server.

Requests pass unchanged (Host too, so signatures hold) unless a waiting ``Fault`` matches; each fault is used ``times``
times. Faults are as S3 and networks make them: answers with S3's error codes, connections reset before, within or after
the request, bodies cut short or altered, silence.
"""

import contextlib
import email.utils
import http.client
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import urlsplit

ANSWERS: Final[Mapping[str, tuple[int, str]]] = {
    "slow down": (503, "SlowDown"),
    "internal error": (500, "InternalError"),
    "bad gateway": (502, ""),
    "bad digest": (400, "BadDigest"),
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "no such upload": (404, "NoSuchUpload"),
    "no such bucket": (404, "NoSuchBucket"),
    "full": (507, "QuotaExceeded"),
    "conflict": (409, "ConditionalRequestConflict"),
}
"""Faults that are answers: the server never sees the request."""

BREAKS: Final = (
    "reset in request",  # half of the body taken, then a reset
    "lost answer",  # the server did it; the answer is lost
    "reset in answer",  # headers and half of the body, then a reset
    "truncated answer",  # headers and half of the body, then an orderly end
    "altered request",  # one bit of the body differs
    "altered answer",  # one bit of the body differs
    "wrong checksum",  # the answer's checksum header is another
    "slow",  # the answer comes after a pause
    "silence",  # the answer does not come in time
)
SLOW_S: Final = 0.2
SILENCE_S: Final = 2.0


@dataclass
class Fault:
    """What to break: ``path`` is a pattern searched in path and query, ``method`` one of HTTP's or any."""

    kind: str
    method: str = ".*"
    path: str = ""
    times: int = 1
    after: int = 0
    """Matching requests that pass before the first one is broken."""
    used: int = 0

    def matches(self, method: str, path: str) -> bool:
        """Whether the fault is for this request and not used up; counts it."""
        if not (re.fullmatch(self.method, method) and re.search(self.path, path)):
            return False
        if self.after:
            self.after -= 1
            return False
        if self.used >= self.times:
            return False
        self.used += 1
        return True


@dataclass(frozen=True)
class Seen:
    """A request that came by."""

    method: str
    path: str
    headers: Mapping[str, str]
    fault: str | None


@dataclass
class FaultProxy:
    """Handle of a running proxy."""

    endpoint_url: str
    upstream: tuple[str, int]
    faults: list[Fault] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def inject(self, *faults: Fault) -> None:
        """Break further requests."""
        with self.lock:
            self.faults.extend(faults)

    def clear(self) -> None:
        """Break nothing any more, forget what came by."""
        with self.lock:
            self.faults.clear()
            self.seen.clear()

    def choose(self, method: str, path: str, headers: Mapping[str, str]) -> str | None:
        """The fault of a request, noted."""
        with self.lock:
            kind = next((one.kind for one in self.faults if one.matches(method, path)), None)
            self.seen.append(Seen(method, path, dict(headers), kind))
        return kind


@contextlib.contextmanager
def running(upstream_url: str) -> Iterator[FaultProxy]:
    """Start a proxy in front of a server, stop it at the end."""
    parts = urlsplit(upstream_url)
    server = _Server(("127.0.0.1", 0), _Handler)
    url = f"http://127.0.0.1:{server.server_address[1]}"
    server.proxy = FaultProxy(url, (parts.hostname or "", parts.port or 80))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Broken connections are what this is for."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def handle_expect_100(self) -> bool:
        return True  # the real answer, or 100, is sent once the fault is known

    def _handle(self) -> None:
        kind = self.server.proxy.choose(self.command, self.path, dict(self.headers))
        if kind == "reset in request" or kind in ANSWERS:
            self._refuse(kind)
            return
        body = self._body()
        if kind == "altered request" and body:
            body = _alter(body)
        status, headers, answer = self._forward(body)
        if kind == "lost answer":
            self._reset()
            return
        if kind in {"slow", "silence"}:
            time.sleep(SLOW_S if kind == "slow" else SILENCE_S)
        if kind == "altered answer" and answer:
            answer = _alter(answer)
        if kind == "wrong checksum":
            sums = {name for name, _ in headers if name.lower().startswith("x-amz-checksum-crc")}
            headers = [(name, "AAAAAA==" if name in sums else value) for name, value in headers]
        half = kind in {"reset in answer", "truncated answer"}
        self._answer(status, headers, answer[: len(answer) // 2] if half else answer)
        if kind == "reset in answer":
            self.wfile.flush()
            self._reset()
        self.close_connection = self.close_connection or half

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _handle

    def _size(self) -> int:
        return int(self.headers.get("Content-Length") or 0)

    def _body(self, size: int | None = None) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        return self.rfile.read(self._size() if size is None else size)

    def _refuse(self, kind: str) -> None:
        if kind == "reset in request":
            self._body(self._size() // 2)
            self._reset()
            return
        self._body()
        status, code = ANSWERS[kind]
        text = f"<Error><Code>{code}</Code><Message>made by the proxy</Message></Error>"
        body = text.encode() if code and self.command != "HEAD" else b""
        at = time.time() - (7200 if kind == "skewed" else 0)
        headers = [
            ("Content-Type", "application/xml"),
            ("Content-Length", str(len(body))),
            ("Date", email.utils.formatdate(at, usegmt=True)),
        ]
        self._answer(status, headers, body)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=60)
        try:
            connection.putrequest(
                self.command, self.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in self.headers.items():
                if name.lower() not in {"expect", "connection"}:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in {"connection", "transfer-encoding"}:
                self.send_header(name, value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _reset(self) -> None:
        """Close with a reset instead of an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True


def _alter(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
