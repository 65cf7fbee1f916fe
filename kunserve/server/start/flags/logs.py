"""Flags of the logs."""

import click

from kunserve.core.front_config import LogConfig
from kunserve.server.start.flags.option import all_of, flags_of

_logs = flags_of("Logs and traces", LogConfig())

LOG_FLAGS = all_of(
    _logs(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        help="Least important lines that are written.",
    ),
    _logs(
        "--log-format",
        type=click.Choice(["text", "json"]),
        help="json writes one object per line, with fields.",
    ),
    _logs(
        "--enable-log-requests/--no-enable-log-requests",
        help="A line when a request arrives, and one when it has ended, with its times.",
    ),
    _logs(
        "--max-log-len",
        type=click.IntRange(min=1),
        help="So many characters of each prompt are in those lines [none].",
    ),
    _logs(
        "--uvicorn-log-level",
        type=click.Choice(["critical", "error", "warning", "info", "debug", "trace"]),
        help="The same for the HTTP library.",
    ),
    _logs(
        "--enable-uvicorn-access-log/--disable-uvicorn-access-log",
        "uvicorn_access_log",
        help="A line for every HTTP request.",
    ),
    _logs(
        "--otlp-traces-endpoint",
        help="Send requests and transitions as OpenTelemetry spans to this collector, for example "
        "http://localhost:4318/v1/traces. Needs the extra otel: pip install '.[otel]' "
        "in KunServe's folder.",
    ),
)
