"""What an answer of S3, or none, means: one table from error codes to what happens next.

S3-compatible stores share the codes but not all of them, so the HTTP status decides where a code is unknown. Messages
carry the code and the store's own words, never a request's headers, where credentials stand.
"""

import re
import time
from email.utils import parsedate_to_datetime
from enum import StrEnum
from typing import Any, Final

import botocore.exceptions as boto
from urllib3.exceptions import HTTPError

from swathe.errors import ConfigError, NoSpaceError, ObjectMissingError, StoreError, SwatheError

FAILURES: Final = (boto.BotoCoreError, boto.ClientError, HTTPError, OSError)
"""Everything that a call of boto3 raises for reasons outside this program."""


class Kind(StrEnum):
    """What a failed request says."""

    TRANSIENT = "transient"
    EXPIRED = "expired credentials"
    SKEWED = "clock skew"
    FULL = "full"
    MISSING = "missing"
    NO_BUCKET = "no bucket"
    DENIED = "denied"
    REFUSED = "refused"
    CONDITION = "condition not met"
    RANGE = "range outside the object"
    NO_UPLOAD = "no such upload"


ANSWERS: Final = frozenset({Kind.CONDITION, Kind.RANGE, Kind.NO_UPLOAD})
"""Kinds that are an answer rather than a failure: whoever asked knows what to do."""


class AnsweredError(StoreError):
    """Raised for one of ANSWERS; handled inside the store. ``attempt`` counts from 1."""

    def __init__(self, message: str, *, kind: Kind = Kind.CONDITION, attempt: int = 1) -> None:
        super().__init__(message)
        self.kind = kind
        self.attempt = attempt


class ClockSkewError(StoreError):
    """Raised when this machine's clock is too far from the store's; no attempt helps until it is set."""


_CODES: Final[dict[str, Kind]] = {
    code: kind
    for kind, codes in {
        Kind.TRANSIENT: (
            "SlowDown Throttling ThrottlingException ThrottledException RequestThrottled TooManyRequests "
            "RequestLimitExceeded BandwidthLimitExceeded ServiceUnavailable InternalError InternalFailure "
            "RequestTimeout RequestTimeoutException OperationAborted ConditionalRequestConflict "
            # The body was damaged on its way, and the store noticed: sending it again helps.
            "BadDigest InvalidDigest XAmzContentSHA256Mismatch XAmzContentChecksumMismatch IncompleteBody"
        ),
        Kind.EXPIRED: "ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired",
        Kind.SKEWED: "RequestTimeTooSkewed RequestInTheFuture",
        Kind.FULL: "QuotaExceeded InsufficientStorage XMinioStorageFull XMinioAdminBucketQuotaExceeded",
        Kind.MISSING: "NoSuchKey NotFound NoSuchVersion",
        Kind.NO_BUCKET: "NoSuchBucket",
        Kind.DENIED: (
            "AccessDenied AccessDeniedException AllAccessDisabled AccountProblem InvalidAccessKeyId "
            "InvalidClientTokenId InvalidToken SignatureDoesNotMatch NotSignedUp UnauthorizedAccess"
        ),
        Kind.CONDITION: "PreconditionFailed",
        Kind.RANGE: "InvalidRange",
        Kind.REFUSED: "NotImplemented",
        Kind.NO_UPLOAD: "NoSuchUpload InvalidPart",
    }.items()
    for code in codes.split()
}

_STATUSES: Final[dict[int, Kind]] = {
    403: Kind.DENIED, 404: Kind.MISSING, 408: Kind.TRANSIENT, 409: Kind.TRANSIENT, 412: Kind.CONDITION,
    416: Kind.RANGE, 429: Kind.TRANSIENT, 501: Kind.REFUSED, 507: Kind.FULL,
}  # fmt: skip

_CONFIGURATION: Final = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.ProfileNotFound,
    boto.ConfigParseError,
    boto.NoRegionError,
    boto.InvalidRegionError,
    boto.UnauthorizedSSOTokenError,
    boto.SSOTokenLoadError,
    boto.ParamValidationError,
    boto.EndpointProviderError,
)


def classify(error: Exception) -> Kind:
    """The kind of a failure of boto3."""
    if isinstance(error, boto.ClientError):
        answer: dict[str, Any] = error.response
        code = str(answer.get("Error", {}).get("Code", ""))
        status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return _CODES.get(code) or _by_status(status)
    if isinstance(error, _CONFIGURATION):
        return Kind.REFUSED
    if isinstance(error, boto.CredentialRetrievalError | boto.MetadataRetrievalError):
        return Kind.EXPIRED  # a fresh session asks the chain again
    return Kind.TRANSIENT


def _by_status(status: int) -> Kind:
    if status in _STATUSES:
        return _STATUSES[status]
    return Kind.REFUSED if 300 <= status < 500 else Kind.TRANSIENT


_MESSAGES: Final[dict[Kind, tuple[type[SwatheError], str]]] = {
    Kind.TRANSIENT: (StoreError, "{url}: cannot {what}: {said}"),
    Kind.EXPIRED: (
        StoreError,
        "{url}: cannot {what}: {said}; new credentials are asked for, renew them if they do not come by themselves",
    ),
    Kind.MISSING: (ObjectMissingError, "{url}: not there, cannot {what} it"),
    Kind.FULL: (NoSpaceError, "{url}: no space left to {what} it ({said}); free some, the work waits"),
    Kind.SKEWED: (
        ClockSkewError,
        ("{url}: cannot {what}: this machine's clock is {skew}the store's, which refuses requests more than 15 minutes "
        "off; set the clock (chronyd, timedatectl), the work is tried again later"),
    ),
    Kind.NO_BUCKET: (
        ConfigError,
        ("bucket {bucket} does not exist ({said}), cannot {what} {url}; create it, or correct the URL, "
        "AWS_ENDPOINT_URL_S3 or the region"),
    ),
    Kind.DENIED: (
        ConfigError,
        ("bucket {bucket} refuses these credentials ({said}), cannot {what} {url}; check AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY, AWS_PROFILE or the role's policy"),
    ),
    Kind.REFUSED: (
        ConfigError,
        ("bucket {bucket}: cannot {what} {url} ({said}); check the URL, AWS_* and SWATHE_S3__* (a store that knows no "
        "newer checksums needs SWATHE_S3__CHECKSUM=md5)"),
    ),
}  # fmt: skip


def explain(error: Exception, *, what: str, url: str, bucket: str, attempt: int) -> SwatheError:
    """The project's error for a failure: ``what`` was done to ``url``."""
    kind, said = classify(error), words(error)
    if kind in ANSWERS:
        return AnsweredError(f"{url}: cannot {what}: {said}", kind=kind, attempt=attempt)
    cls, form = _MESSAGES[kind]
    return cls(form.format(url=url, what=what, said=said, bucket=bucket, skew=_skew(error)))


def words(error: Exception) -> str:
    """A failure in one line, without what a URL's user part or a request's headers might hold."""
    if isinstance(error, boto.ClientError):
        answer: dict[str, Any] = error.response
        code, message = (str(answer.get("Error", {}).get(name, "")) for name in ("Code", "Message"))
        text = f"{code}: {message}" if message else code
    else:
        text = str(error) or type(error).__name__
    return re.sub(r"//[^/@\s]*@", "//***@", " ".join(text.split()))[:300]


def _skew(error: Exception) -> str:
    if not isinstance(error, boto.ClientError):
        return "too far from "
    answer: dict[str, Any] = error.response
    headers: dict[str, str] = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    try:
        ahead_s = time.time() - parsedate_to_datetime(headers["date"]).timestamp()
    except (KeyError, ValueError):
        return "too far from "
    return f"{abs(ahead_s):.0f} s {'ahead of' if ahead_s > 0 else 'behind'} "
