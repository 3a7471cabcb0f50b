"""A run under an s3:// prefix: AWS, or any store that speaks S3 well enough.

Objects appear whole. ``create`` is If-None-Match: * where the store honours it, which is tried out once for each process
and bucket, because a store that ignores the header answers 200; elsewhere the last of two racing writers wins.
"""

import contextlib
import io
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import FlexibleChecksumError

from swathe import log
from swathe.errors import ConfigError, ObjectMissingError, StoreError, SwatheError
from swathe.settings import S3Settings
from swathe.store.base import Buffer, ObjectInfo, Written
from swathe.store.s3_connection import Connection, connect
from swathe.store.s3_errors import AnsweredError, Kind
from swathe.store.s3_upload import Target

logger = log.get("s3")

_TEMPORARY: Final = ".tmp-"
_BLOCK_BYTES: Final = 1 << 20


class S3Store:
    """A bucket and a prefix. Picklable; every process that uses it makes a client of its own."""

    def __init__(
        self, url: str, settings: S3Settings, connection: Connection | None = None
    ) -> None:
        """Nothing is asked of the store yet. Raises ConfigError for a URL without a bucket."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket:
            msg = f"{url}: names no bucket; write s3://bucket/prefix"
            raise ConfigError(msg)
        self._bucket = bucket
        self._root = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self._settings = settings
        self._connection = connection or connect(settings)

    def __reduce__(self) -> tuple[object, ...]:
        return S3Store, (self.url, self._settings)

    @property
    def url(self) -> str:
        """The prefix, without a slash at its end."""
        return f"s3://{self._bucket}/{self._root}".rstrip("/")

    @property
    def retries(self) -> int:
        """Attempts after the first that all stores on this connection needed, for metrics."""
        return self._connection.retries

    def read(self, key: str) -> bytes:
        """All bytes of an object; a body that breaks off is resumed where it broke."""
        return self._fetch(key, 0, None)

    def read_range(self, key: str, offset: int, size_bytes: int) -> bytes:
        """One ranged GET."""
        if size_bytes == 0:
            return b""
        try:
            data = self._fetch(key, offset, size_bytes)
        except AnsweredError as error:
            if error.kind is not Kind.RANGE:
                raise
            info = self.stat(key)
            end = info.size_bytes if info else 0
        else:
            if len(data) == size_bytes:
                return data
            end = offset + len(data)
        msg = f"{self._name(key)}: ends at byte {end}, {offset + size_bytes} wanted"
        raise StoreError(msg)

    def write(self, key: str, chunks: Iterable[Buffer]) -> Written:
        """One put, or parts when larger than ``part_bytes``; each checked by the store on arrival."""
        return self._target(key).write(chunks)

    def create(self, key: str, data: bytes) -> bool:
        """A conditional put. A repeated request that meets its own object has won."""
        if not self._conditional():
            return self._create_blindly(key, data)
        try:
            self._target(key).put([memoryview(data)], IfNoneMatch="*")
        except AnsweredError as error:
            if error.kind is not Kind.CONDITION:
                raise
            return error.attempt > 1 and self._holds(key, data)
        return True

    def stat(self, key: str) -> ObjectInfo | None:
        """Size and time of an object."""
        try:
            head = self._call("stat", key, methodcaller("head_object", **self._target(key).place))
        except ObjectMissingError:
            return None
        return ObjectInfo(
            key=key,
            size_bytes=head["ContentLength"],
            modified_s=head["LastModified"].timestamp(),
            tag=head["ETag"],
        )

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Pages of a thousand."""
        for page in self._pages("list_objects_v2", prefix, ["ContinuationToken"]):
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._root)
                if not key.rpartition("/")[2].startswith(_TEMPORARY):
                    yield ObjectInfo(
                        key=key,
                        size_bytes=item["Size"],
                        modified_s=item["LastModified"].timestamp(),
                        tag=item["ETag"],
                    )

    def delete(self, key: str) -> None:
        """Remove an object; S3 itself does not mind a missing one."""
        with contextlib.suppress(ObjectMissingError):
            self._call("delete", key, methodcaller("delete_object", **self._target(key).place))

    def collect(self, *, older_than_s: float, prefix: str = "") -> int:
        """Abort uploads that dead writers left unfinished: invisible, but billed."""
        aborted = 0
        for page in self._pages("list_multipart_uploads", prefix, ["KeyMarker", "UploadIdMarker"]):
            for upload in page.get("Uploads", ()):
                if time.time() - upload["Initiated"].timestamp() > older_than_s:
                    self._abort(upload["Key"].removeprefix(self._root), upload["UploadId"])
                    aborted += 1
        return aborted

    def free_bytes(self) -> int | None:
        """A bucket has no limit that could be asked for."""
        return None

    def local_path(self, key: str) -> Path | None:
        """There is no file."""
        del key
        return None

    def _name(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _target(self, key: str) -> Target:
        return Target(self._connection, self._bucket, self._root + key, self._name(key))

    def _call(self, what: str, key: str, action: Callable[[Any], Any]) -> Any:
        return self._connection.call(action, what=what, url=self._name(key), bucket=self._bucket)

    def _fetch(self, key: str, offset: int, size_bytes: int | None) -> bytes:
        """GET a slice (at most: the object may end) or all of it, resuming after a break."""
        buffer = io.BytesIO()
        tag: str | None = None

        def action(client: Any) -> None:
            nonlocal tag
            first = offset + buffer.tell()
            last = "" if size_bytes is None else str(offset + size_bytes - 1)
            ranged = {"Range": f"bytes={first}-{last}"} if first or last else {}
            answer = client.get_object(**self._target(key).place, **ranged)
            with contextlib.closing(answer["Body"]) as body:
                if tag not in {None, answer["ETag"]} or bool(ranged) != ("ContentRange" in answer):
                    buffer.seek(0)
                    buffer.truncate()
                    tag = None
                    msg = f"{self._name(key)}: changed while it was read"
                    raise StoreError(msg)
                tag = answer["ETag"]
                self._drain(body, buffer, buffer.tell() + answer["ContentLength"], key)

        while True:
            before = buffer.tell()
            try:
                self._call("read", key, action)
                break
            except StoreError:
                # A flaky line that gets on earns a new budget: gigabytes may need more attempts than one request.
                if buffer.tell() < before + _BLOCK_BYTES:
                    raise
        # The buffer's own bytes, not a copy.
        return buffer.getvalue()

    def _drain(self, body: Any, buffer: io.BytesIO, end: int, key: str) -> None:
        try:
            while block := body.read(_BLOCK_BYTES):
                buffer.write(block)
        except FlexibleChecksumError:
            # Nobody knows which bytes are wrong: all of them are read again.
            buffer.seek(0)
            buffer.truncate()
            raise
        if buffer.tell() != end:
            msg = f"{self._name(key)}: body broke off at byte {buffer.tell()} of {end}"
            raise StoreError(msg)

    def _conditional(self) -> bool:
        """Whether the bucket honours If-None-Match; asked once, with two puts of a throw-away object."""
        if self._settings.conditional_create != "auto":
            return self._settings.conditional_create == "on"
        known = self._connection.conditional
        if self._bucket not in known:
            known[self._bucket] = self._try_condition()
            if not known[self._bucket]:
                logger.warning(
                    "the store does not honour If-None-Match: of two workers on one range the last record wins, and "
                    "the other's shard stays until swathe gc",
                    bucket=self._bucket,
                )
        return known[self._bucket]

    def _try_condition(self) -> bool:
        key = f"{_TEMPORARY}probe-{secrets.token_hex(8)}"
        probe = self._target(key)
        try:
            probe.put([memoryview(b"probe")])
            with contextlib.suppress(
                ConfigError
            ):  # a store that knows the header, but not its purpose
                probe.put([memoryview(b"probe")], IfNoneMatch="*")
        except AnsweredError as error:
            return error.kind is Kind.CONDITION
        finally:
            with contextlib.suppress(SwatheError):
                self.delete(key)
        return False

    def _create_blindly(self, key: str, data: bytes) -> bool:
        if self.stat(key) is not None:
            return False
        self._target(key).put([memoryview(data)])
        return True

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.read(key) == data
        except ObjectMissingError:
            return False

    def _abort(self, key: str, upload_id: str) -> None:
        place = self._target(key).place
        with contextlib.suppress(ObjectMissingError, AnsweredError):  # gone by itself
            self._call(
                "abort upload of",
                key,
                methodcaller("abort_multipart_upload", **place, UploadId=upload_id),
            )

    def _pages(
        self, operation: str, prefix: str, markers: Iterable[str]
    ) -> Iterator[dict[str, Any]]:
        """All answers of a listing; ``markers`` are the parameters that ask for the next one."""
        arguments = {"Bucket": self._bucket, "Prefix": self._root + prefix}
        while True:
            page = self._call("list", prefix, methodcaller(operation, **arguments))
            yield page
            # SeaweedFS gives one of the two markers of an upload; AWS gives both.
            more = {name: page[f"Next{name}"] for name in markers if f"Next{name}" in page}
            if not page.get("IsTruncated") or not more:
                return
            arguments |= more
