"""Wall-clock time as it stands in files: UTC to the second, so that text compares like time."""

import time


def utc_now() -> str:
    """Now, as 2026-01-31T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
