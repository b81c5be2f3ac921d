"""Log lines: one an event, whatever clients send."""

from __future__ import annotations

import io
import json
import logging
from typing import TYPE_CHECKING

import pytest

from nepserve import logs

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """The program's logger, left as it was."""
    loggers = [logging.getLogger(name) for name in ("nepserve", "uvicorn")]
    before = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield loggers[0]
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_path_cannot_forge_a_line(log: logging.Logger) -> None:
    stream = io.StringIO()
    logs.configure("text", "info", stream)
    log.info("%s %s", "GET", "/x\r\n2026-01-01 00:00:00 error: all is lost\x1b[2J\u2028é")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r"GET /x\r\n2026-01-01 00:00:00 error: all is lost\x1b[2J\u2028é")


def test_tracebacks_keep_their_lines(log: logging.Logger) -> None:
    stream = io.StringIO()
    logs.configure("text", "info", stream)
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        log.exception("failed: %s", error)
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith(r"error: failed: two\nlines")
    assert rest[0].startswith("Traceback")
    assert len(rest) > 3


def test_json_lines_can_be_read(log: logging.Logger) -> None:
    stream = io.StringIO()
    logs.configure("json", "warning", stream)
    log.info("too quiet")
    log.warning("a\nb", extra={"request_id": "r1", "model": None})
    entry = json.loads(stream.getvalue())
    assert (entry["level"], entry["message"], entry["request_id"]) == ("warning", "a\nb", "r1")
    assert "model" not in entry
