"""The log of every process of a cluster: lines for people, or one JSON object per line."""

import json
import logging
import re
import sys
import time
from typing import Any

from kunserve.core.config import LogConfig
from kunserve.core.ids import InstanceId

_PLACEHOLDER = re.compile(r"(?:(\w+)=)?%[-+ #0]*\d*(?:\.\d+)?([a-zA-Z%])")
_AFTER_VALUE = re.compile(r"$|[\s,;]|: ")
"""What follows a value; otherwise it is only the beginning of one."""


class JsonFormatter(logging.Formatter):
    """One JSON object per record. What a line calls ``name=%s`` is a field of that name too."""

    def __init__(self, instance_id: InstanceId | None = None) -> None:
        super().__init__()
        self._always = {} if instance_id is None else {"instance": instance_id}

    def format(self, record: logging.LogRecord) -> str:
        """See ``logging.Formatter``."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = self._always | fields_of(record)
        entry |= {name: value for name, value in fields.items() if name not in entry}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """The named values of a record: ``x=%d`` and 5 are ``{"x": 5}``."""
    if not isinstance(record.args, tuple):
        return {}
    found = [one for one in _PLACEHOLDER.finditer(str(record.msg)) if one[2] != "%"]
    if len(found) != len(record.args):
        return {}
    text = str(record.msg)
    return {
        one[1]: value
        for one, value in zip(found, record.args, strict=True)
        if one[1] is not None and _AFTER_VALUE.match(text, one.end())
    }


def start_logging(config: LogConfig, instance_id: InstanceId | None = None) -> None:
    """Called once, at the start of a process. Other libraries' debug lines are left out."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(instance_id))
    else:
        who = "" if instance_id is None else f"instance={instance_id} "
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {who}%(message)s"))
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler])
    logging.getLogger("kunserve").setLevel(level)
