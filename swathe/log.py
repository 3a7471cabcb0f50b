"""Logging: one structured event a line on stderr; console form on a terminal, JSON elsewhere."""

import logging
import sys
from typing import Any, Literal

import structlog


def setup(*, form: Literal["auto", "console", "json"] = "auto", level: str = "info") -> None:
    """Send structlog's and the standard library's events to stderr in one form. Called by a command line only."""
    console = form == "console" or (form == "auto" and sys.stderr.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
        if console
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer,
        ])
    )  # fmt: skip
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries that narrate every call drown the operator's own lines.
    for noisy in ("rq", "urllib3", "botocore", "boto3", "httpx", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def get(name: str) -> Any:
    """A logger of a component's name. Modules ask before ``setup``: bound here, it would go elsewhere for ever."""
    return structlog.get_logger(name)
