"""A small HTTP server for metrics, health and discovery: GET only, no state, one thread for each request."""

import json
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import unquote

from swathe import log
from swathe.errors import ConfigError

_REQUEST_S: Final = 10.0
"""A client that sends or takes nothing for so long is cut off."""
OFF: Final = "off"
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a route returns."""

    body: bytes
    status: int = 200
    content_type: str = "text/plain; charset=utf-8"

    @classmethod
    def json(cls, value: Any, status: int = 200) -> "Answer":
        """A JSON document."""
        return cls(json.dumps(value).encode() + b"\n", status, "application/json")

    @classmethod
    def metrics(cls, text: bytes) -> "Answer":
        """Prometheus' text format."""
        return cls(text, 200, _METRICS_TYPE)


Route = Callable[[], Answer]
Branch = Callable[[str], Answer]
"""Answers everything under a path that ends with a slash; told the rest."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. Port 0 takes any free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, *, name: str) -> "Address | None":
        """``host:port``, or None for ``off``. Raises ConfigError naming the variable."""
        if text == OFF:
            return None
        host, separator, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not separator or not host or not port.isdecimal() or int(port) > 65535:
            msg = f"{name}: {text!r} is no address; write HOST:PORT such as 127.0.0.1:9410, or off"
            raise ConfigError(msg)
        return cls(host, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def reachable(self) -> str:
        """How others call it: an address that means "every interface" becomes this machine's name."""
        everywhere = self.host in {"0.0.0.0", "::", ""}  # noqa: S104 - compared, not bound
        return f"{socket.gethostname()}:{self.port}" if everywhere else str(self)


class WebServer:
    """Serves until closed. Raises OSError when the address cannot be had."""

    def __init__(
        self,
        address: Address,
        routes: Mapping[str, Route],
        branches: Mapping[str, Branch] | None = None,
    ) -> None:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        server_class = type(
            "_Server", (ThreadingHTTPServer,), {"daemon_threads": True, "address_family": family}
        )
        self._server = server_class((address.host, address.port), _handler(routes, branches or {}))
        self.address = Address(address.host, int(self._server.server_address[1]))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            name="web",
            daemon=True,
            kwargs={"poll_interval": 0.2},
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


def _find(path: str, routes: Mapping[str, Route], branches: Mapping[str, Branch]) -> Route | None:
    if path in routes:
        return routes[path]
    stem, _, rest = path.rpartition("/")
    branch = branches.get(f"{stem}/")
    return None if branch is None else partial(branch, unquote(rest))


def _handler(
    routes: Mapping[str, Route], branches: Mapping[str, Branch]
) -> type[BaseHTTPRequestHandler]:
    logger = log.get("web")

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S
        server_version = "swathe"
        sys_version = ""

        def do_GET(self) -> None:
            route = _find(self.path.partition("?")[0], routes, branches)
            if route is None:
                self._send(Answer(("\n".join(sorted([*routes, *branches])) + "\n").encode(), 404))
                return
            try:
                answer = route()
            except Exception:
                logger.exception("request failed", path=self.path)
                answer = Answer(b"failed, see the log\n", 500)
            self._send(answer)

        def _send(self, answer: Answer) -> None:
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.content_type)
            self.send_header("Content-Length", str(len(answer.body)))
            self.end_headers()
            self.wfile.write(answer.body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
            """Scrapes are no news."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError as error:  # the client went away
                logger.debug("request broken off", error=str(error))

    return Handler
