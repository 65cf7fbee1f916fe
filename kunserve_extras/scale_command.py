"""``kunserve scale``: ask a server for more or fewer instances, and wait until it has them."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

import click

from kunserve.server.start.flags.option import FiniteRange

POLL_S = 0.5
ANSWER_S = 30.0
"""How long one answer of the server may take."""


@click.command("scale")
@click.argument("num_instances", type=click.IntRange(min=1))
@click.option(
    "--base-url",
    "--url",
    "url",
    default="http://127.0.0.1:8000",
    show_default=True,
    help="Of the server.",
)
@click.option(
    "--api-key", envvar="KUNSERVE_API_KEY", help="The server's key [KUNSERVE_API_KEY, or none]."
)
@click.option(
    "--wait/--no-wait",
    default=True,
    show_default=True,
    help="Return when the instances serve, and those that leave have gone.",
)
@click.option(
    "--timeout",
    "timeout_s",
    default=600.0,
    show_default=True,
    type=FiniteRange(min=0, min_open=True),
    help="Seconds to wait for that.",
)
def scale_command(
    num_instances: int, url: str, api_key: str | None, wait: bool, timeout_s: float
) -> None:
    """Have a running server use NUM_INSTANCES instances.

    The server must have been started with --enable-admin. New instances get requests as soon as
    they have loaded the model. Those that leave end what they have first. The cluster does not
    shrink below NUM_INSTANCES by itself afterwards.
    """
    server = _Server(url.rstrip("/"), api_key)
    answer = server.ask("/kunserve/scale", {"num_instances": num_instances})
    click.echo(answer["result"])
    deadline_s = time.monotonic() + timeout_s
    while wait:
        state = server.ask("/kunserve/state")
        size = state["size"]
        if size["wanted"] != num_instances:
            reasons = "; ".join(state["reasons"]) or "somebody asked for another size meanwhile"
            raise click.ClickException(f"{size['wanted']} instances are wanted now: {reasons}")
        num_alive = sum(instance["alive"] for instance in state["instances"])
        if num_alive == num_instances and not size["ordered"] and not size["leaving"]:
            click.echo(f"{num_instances} instances serve")
            return
        if time.monotonic() > deadline_s:
            raise click.ClickException(
                f"after {timeout_s:g} s {num_alive} instances serve, {size['ordered']} start and "
                f"{size['leaving']} leave"
            )
        time.sleep(POLL_S)


class _Server:
    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The server's answer to a GET, or to a POST with this body. Raises ClickException."""
        if not self._url.startswith(("http://", "https://")):
            raise click.ClickException(
                f"--base-url must begin with http:// or https://: {self._url}"
            )
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise click.ClickException(_message_of(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise click.ClickException(f"no answer from {self._url}: {error}") from None


def _message_of(error: urllib.error.HTTPError) -> str:
    """What the server says of an error, if it is one of ours."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answers {error.code} {error.reason}"
