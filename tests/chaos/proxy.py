"""A forwarder between one worker and Redis that can cut the line or leave it half open."""

import contextlib
import socket
import threading
from pathlib import Path


class Proxy:
    """Listens on a unix socket and forwards to another. ``mode``: pass, cut (refuse and close), stall (swallow)."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.path = folder / "p"
        self.url = f"unix://{self.path}"
        self._target = str(target)
        self._mode = "pass"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def set_mode(self, mode: str) -> None:
        self._mode = mode
        if mode == "cut":
            self._close_pairs()

    def close(self) -> None:
        self._mode = "cut"
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_pairs()

    def _close_pairs(self) -> None:
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        self._pairs.clear()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(socket.AF_UNIX)
            try:
                if self._mode == "cut":
                    raise ConnectionError
                server.connect(self._target)
            except OSError:
                client.close()
                server.close()
                continue
            self._pairs.append((client, server))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._mode != "stall":
                    sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
