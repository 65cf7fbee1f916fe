"""Which panels of Grafana boards have data, by a real Prometheus that scrapes a real server.

    python -m benchmarks.serving.boards [BOARD.json ...]    needs `prometheus` (Debian has it)

A server of two instances gets a few streams, a forced drop, a restore and a death. Then every
query of every panel is asked over the whole time. The rules of deploy/prometheus are evaluated too.
"""

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kunserve_lab.bench.server_process import running_server, unwinding_on_sigterm

BOARD = Path("deploy/grafana/dashboards/kunserve.json")
RULES = Path("deploy/prometheus/alerts.yml")
DOCUMENT = Path("docs/metrics.md")
MODEL = "smollm2-135m"
SERVER = (
    MODEL, "--num-instances", "2", "--instance-memory", "343MiB", "--enable-admin",
    "--weights", "private",  # shared ones leave nothing to drop
    "--served-model-name", "small", "--max-num-queued-reqs", "4", "--front-grace", "0",
    "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}',
)  # fmt: skip
STREAMS, TOKENS = 6, 60
LOAD_S = 45.0
VARIABLES = {
    "$__rate_interval": "20s",
    "$__interval": "5s",
    "$__range": "5m",
    "$model_name": "small",
    "$instance": ".*",
}


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a board."""

    panel: str
    expression: str


def queries(board: dict[str, Any]) -> Iterator[Query]:
    """Of its panels, those in rows included, and of its annotations."""
    for panel in board["panels"]:
        for inner in (panel, *panel.get("panels", ())):
            for target in inner.get("targets", ()):
                yield Query(inner.get("title", ""), target["expr"])
    for annotation in board["annotations"]["list"]:
        if "expr" in annotation:
            yield Query(f"annotation {annotation['name']}", annotation["expr"])


def documented(text: str) -> Iterator[Query]:
    """The queries that a document shows."""
    for expression in re.findall(r"```promql\n(.*?)```", text, re.DOTALL):
        yield Query("documented", expression)


def with_values(expression: str, variables: dict[str, str]) -> str:
    """The expression as Grafana would send it; variables not named are any value."""
    for name in sorted(variables, key=len, reverse=True):
        expression = expression.replace(name, variables[name])
    return re.sub(r"\$\{?\w+\}?", ".*", expression)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **parameters: Any) -> Any:
        """The data of an answer. Raises ValueError with what is wrong with the query."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(error.read().decode()) from error

    def values(self, expression: str, since_s: float) -> list[float]:
        """All values of all series over the time; NaN, a division by nothing, is none."""
        found = self.ask("query_range", query=expression, start=since_s, end=time.time(), step="5s")
        values = [float(value) for one in found["result"] for _, value in one["values"]]
        return [value for value in values if value == value]


@contextlib.contextmanager
def scraping(target: str) -> Generator[Prometheus, None, None]:
    """A Prometheus that scrapes one server, with our rules, in a folder of its own."""
    with unwinding_on_sigterm(), tempfile.TemporaryDirectory(prefix="boards-") as folder:
        settings = {
            "global": {"scrape_interval": "2s", "evaluation_interval": "2s"},
            "rule_files": [str(RULES.absolute())],
            "scrape_configs": [{"job_name": "kunserve", "static_configs": [{"targets": [target]}]}],
        }
        (Path(folder) / "prometheus.yml").write_text(json.dumps(settings))
        port = 9800 + int(target.rpartition(":")[2]) % 97
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=error",
            ]
        )
        try:
            yield Prometheus(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
            process.wait(20)


def post(url: str, body: dict[str, Any]) -> bool:
    """Send a request and read its answer to the end; False if it is refused."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
    except urllib.error.HTTPError as error:
        if error.code != 503:
            print(f"{url}: {error.code} {error.read()[:200]!r}")
        return False
    return True


def load(url: str, until_s: float) -> None:
    """Some streams, one after the other, several at a time."""

    def stream(number: int) -> None:
        while time.time() < until_s:
            prompt = f"Number {number}. " + "The story goes on. " * (10 * number)
            body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "n": 1 + number % 2}
            if not post(f"{url}/v1/completions", body):
                time.sleep(1.0)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(LOAD_S / 3)
    post(f"{url}/kunserve/drop", {})
    time.sleep(LOAD_S / 3)
    post(f"{url}/kunserve/restore", {})
    time.sleep(LOAD_S / 6)
    post(f"{url}/kunserve/kill", {"instance_id": 1})
    for thread in threads:
        thread.join()


def report(prometheus: Prometheus, source: Path, since_s: float) -> int:
    """Tell of each query of a board or a document what it found; how many found nothing."""
    num_empty = 0
    text = source.read_text()
    asked = queries(json.loads(text)) if source.suffix == ".json" else documented(text)
    for query in asked:
        expression = with_values(query.expression, VARIABLES)
        try:
            values = prometheus.values(expression, since_s)
            told = f"{len(values)} values, {min(values):.4g} to {max(values):.4g}" if values else ""
        except ValueError as error:
            values, told = [], f"WRONG {error}"
        num_empty += not values
        print(f"{told or 'EMPTY':40} {query.panel:35} {' '.join(query.expression.split())}")
    print(f"{source}: {num_empty} queries are empty\n")
    return num_empty


def main() -> None:
    """Serve, load, drop, restore, ask."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("boards", nargs="*", type=Path, default=[BOARD])
    boards = parser.parse_args().boards
    with (
        running_server(SERVER) as server,
        scraping(server.url.removeprefix("http://")) as prometheus,
    ):
        since_s = time.time()
        load(server.url, since_s + LOAD_S)
        time.sleep(5.0)
        num_empty = sum(report(prometheus, board, since_s) for board in (*boards, DOCUMENT))
        for group in prometheus.ask("rules")["groups"]:
            for rule in group["rules"]:
                print(f"{rule['health']:8} {rule.get('state', ''):10} {rule['name']}")
                num_empty += rule["health"] != "ok"
    sys.exit(num_empty > 0)


if __name__ == "__main__":
    main()
