"""Uploading an object from buffers: one checksummed put when small, parts side by side when large.

Buffers are never copied: a part is a list of slices, hashed and sent from where they lie. At most ``concurrency`` parts
are on the way, so a source that makes its buffers on the fly holds no more than these. The object appears with the last
request or not at all; an upload that fails takes its parts with it.
"""

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import xxhash

from swathe import log
from swathe.errors import ConfigError, ObjectMissingError, StoreError, SwatheError
from swathe.settings import S3Settings
from swathe.store.base import Buffer, Written
from swathe.store.s3_body import Body, checksum, cut
from swathe.store.s3_connection import Connection
from swathe.store.s3_errors import AnsweredError, Kind

logger = log.get("s3")

_MAX_PARTS: Final = 10_000
_TOKEN: Final = "swathe-upload"  # noqa: S105 - a metadata name
_MADE_WITH: Final = {"crc32": "CRC32", "sha256": "SHA256"}


def object_options(settings: S3Settings) -> dict[str, str]:
    """Encryption, ACL and storage class as the user set them."""
    options = {
        "ACL": settings.acl,
        "ServerSideEncryption": settings.sse,
        "SSEKMSKeyId": settings.sse_kms_key_id,
        "StorageClass": settings.storage_class,
    }
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Target:
    """Where an object goes. ``url`` names it in messages."""

    connection: Connection
    bucket: str
    key: str
    url: str

    def call(
        self, what: str, action: Callable[[Any], Any], stop: threading.Event | None = None
    ) -> Any:
        """A request with retries."""
        return self.connection.call(action, what=what, url=self.url, bucket=self.bucket, stop=stop)

    @property
    def place(self) -> dict[str, str]:
        """The parameters that name the object."""
        return {"Bucket": self.bucket, "Key": self.key}

    def put(self, pieces: Sequence[memoryview], **condition: str) -> None:
        """One request with a checksum."""
        settings = self.connection.settings
        sums = checksum(settings.checksum, pieces)

        def action(client: Any) -> None:
            answer = client.put_object(
                **self.place, Body=Body(pieces), **sums, **object_options(settings), **condition
            )
            _compare(answer, sums, self.url)

        self.call("write", action)

    def write(self, chunks: Iterable[Buffer]) -> Written:
        """Store the bytes of the chunks; see ``Store.write``."""
        digest, size_bytes = xxhash.xxh3_128(), 0

        def parts() -> Iterator[list[memoryview]]:
            nonlocal size_bytes
            for pieces in cut(chunks, self.connection.settings.part_bytes):
                for piece in pieces:
                    digest.update(piece)
                    size_bytes += piece.nbytes
                yield pieces

        stream = parts()
        first, second = next(stream, []), next(stream, None)
        if second is None:
            self.put(first)
        else:
            _Multipart(self).run(itertools.chain([first, second], stream), lambda: size_bytes)
        return Written(size_bytes=size_bytes, xxh3=digest.hexdigest())


class _Multipart:
    """One upload in parts."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._settings = target.connection.settings
        self._token = secrets.token_hex(16)
        self._stop = threading.Event()

    def run(self, parts: Iterator[list[memoryview]], size_bytes: Callable[[], int]) -> None:
        """Send all parts and complete, or abort. ``size_bytes()`` is asked when all parts were taken."""
        upload_id = self._start()
        try:
            done = self._send_all(parts, upload_id)
            self._complete(upload_id, done, size_bytes())
        except BaseException:
            self._abort(upload_id)
            raise

    def _start(self) -> str:
        options = object_options(self._settings)
        if algorithm := _MADE_WITH.get(self._settings.checksum):
            options["ChecksumAlgorithm"] = algorithm
        answer = self._target.call(
            "start upload of",
            lambda client: client.create_multipart_upload(
                **self._target.place, Metadata={_TOKEN: self._token}, **options
            ),
        )
        return str(answer["UploadId"])

    def _send_all(self, parts: Iterator[list[memoryview]], upload_id: str) -> list[dict[str, Any]]:
        done: list[dict[str, Any]] = []
        waiting: deque[Future[dict[str, Any]]] = deque()
        pool = ThreadPoolExecutor(self._settings.concurrency, "s3-part")
        try:
            for number, pieces in enumerate(parts, start=1):
                if len(waiting) == self._settings.concurrency:
                    done.append(waiting.popleft().result())
                waiting.append(pool.submit(self._send, upload_id, number, pieces))
            done.extend(future.result() for future in waiting)
        except BaseException:
            self._stop.set()
            raise
        finally:
            # Waits: a part that is still on its way reads its buffers, and would outlive an abort.
            pool.shutdown(cancel_futures=True)
        return done

    def _send(self, upload_id: str, number: int, pieces: list[memoryview]) -> dict[str, Any]:
        if number > _MAX_PARTS:
            msg = f"{self._target.url}: more than {_MAX_PARTS} parts; raise SWATHE_S3__PART_BYTES"
            raise ConfigError(msg)
        sums = checksum(self._settings.checksum, pieces)

        def action(client: Any) -> str:
            answer = client.upload_part(
                **self._target.place,
                UploadId=upload_id,
                PartNumber=number,
                Body=Body(pieces),
                **sums,
            )
            _compare(answer, sums, f"{self._target.url} part {number}")
            return str(answer["ETag"])

        tag = self._target.call("write", action, self._stop)
        sums.pop("ContentMD5", None)
        return {"PartNumber": number, "ETag": tag, **sums}

    def _complete(self, upload_id: str, parts: list[dict[str, Any]], size_bytes: int) -> None:
        target = self._target
        try:
            target.call(
                "complete",
                lambda client: client.complete_multipart_upload(
                    **target.place, UploadId=upload_id, MultipartUpload={"Parts": parts}
                ),
            )
        except AnsweredError as answer:
            # The first attempt may have completed it and lost the answer: the object tells.
            if answer.kind is not Kind.NO_UPLOAD:
                raise
            self._require(size_bytes, token=self._token)
        else:
            self._require(size_bytes, token=None)

    def _require(self, size_bytes: int, token: str | None) -> None:
        """Look at the finished object. Raises StoreError when it is not ours or not whole."""
        target = self._target
        try:
            head = target.call("check", lambda client: client.head_object(**target.place))
        except ObjectMissingError as error:
            msg = f"{target.url}: the upload is gone (aborted by another hand or a lifecycle rule); tried again later"
            raise StoreError(msg) from error
        if token and head["Metadata"].get(_TOKEN) != token:
            msg = f"{target.url}: the upload is gone and the object is another's; tried again later"
            raise StoreError(msg)
        if head["ContentLength"] != size_bytes:
            target.call("delete", lambda client: client.delete_object(**target.place))
            msg = f"{target.url}: the store has {head['ContentLength']} of {size_bytes} bytes; deleted, tried again later"
            raise StoreError(msg)

    def _abort(self, upload_id: str) -> None:
        target = self._target
        try:
            target.call(
                "abort upload of",
                lambda client: client.abort_multipart_upload(**target.place, UploadId=upload_id),
            )
        except SwatheError as error:
            if not (isinstance(error, AnsweredError) and error.kind is Kind.NO_UPLOAD):
                logger.warning("parts of a failed upload stay until swathe gc", reason=str(error))


def _compare(answer: dict[str, Any], sums: dict[str, str], url: str) -> None:
    """The checksum the store says it has must be the one we sent. Raises StoreError otherwise."""
    for name, value in sums.items():
        if answer.get(name, value) != value:
            msg = f"{url}: the store computed {name} {answer[name]}, {value} was sent"
            raise StoreError(msg)
