"""Log lines: structlog over the standard library, so that libraries' lines look like ours.

Lines carry ids, codes, counts and times; never tool inputs, results, message text or secrets.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import Processor

from app.settings import Settings

NOISY_LOGGERS = (
    "sqlalchemy",
    "asyncpg",
    "aiohttp.access",
    "uvicorn.access",
    "alembic",
    "httpx",
    "httpcore",
    "urllib3",
)
"""Libraries whose lines below a warning may show statements, parameters or paths."""


def set_up_logs(settings: Settings, stream: TextIO = sys.stderr) -> None:
    """Send every log line of the process to `stream`, as JSON or as text."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_renderers(settings.log_format, colors=stream.isatty()),
        ],
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.upper())
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return the logger of a module; its calls take an event name and key-value pairs."""
    bound: structlog.stdlib.BoundLogger = structlog.stdlib.get_logger(name)
    return bound


def _renderers(log_format: Literal["json", "text"], *, colors: bool) -> list[Processor]:
    if log_format == "json":
        # Frames without their local variables: those hold inputs and secrets.
        frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer()]
    plain = structlog.dev.plain_traceback
    return [structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain, timestamp_key="time")]
