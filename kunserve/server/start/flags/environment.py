"""Variables of the environment that look like settings and are none: most likely a slip."""

import difflib
import os
import re

import click

from kunserve.engine.cpu.kernels.levels import VARIABLE as KERNELS
from kunserve.server.start.flags.option import PREFIX, ModelArgument, ServeFlag, variable_value

_KUBERNETES = re.compile(r".*_(SERVICE_(HOST|PORT.*)|PORT(_\d+_.*)?)")
"""What Kubernetes sets in every pod beside a service whose name begins with ``kunserve``."""


def variables_of(command: click.Command) -> dict[str, click.Parameter]:
    """Each variable that the command reads, with its parameter."""
    return {
        parameter.variable: parameter
        for parameter in command.params
        if isinstance(parameter, ServeFlag | ModelArgument)
    }


def set_variables(command: click.Command) -> list[str]:
    """Those that are set."""
    return sorted(name for name in variables_of(command) if variable_value(name))


def unknown_variables(command: click.Command) -> list[str]:
    """For each ``KUNSERVE_`` variable that nothing reads, one line that says so."""
    known = variables_of(command)
    lines = []
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name in known or name == KERNELS:
            continue
        if _KUBERNETES.fullmatch(name):
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        lines.append(f"the variable {name} is no setting{hint}")
    return lines
