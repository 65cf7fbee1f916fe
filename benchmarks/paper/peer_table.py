"""Engine against engine: the tables of docs/results.md, one row for each case and processor."""

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import figures_of
from benchmarks.serving.peer_servers import PEERS
from benchmarks.serving.peers import CASES, OURS

_TITLES = {OURS: "KunServe", "vllm": "vLLM 0.32", "vllm-zen": "vLLM 0.32, zentorch",
           "openvino": "OpenVINO GenAI, fp16", "llama.cpp": "llama.cpp"}  # fmt: skip


def peers() -> list[Row]:
    """Tokens per second: medians of the rounds, least and most; the newest run of a processor."""
    newest: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
    for line in figures_of("peers"):
        settings = line["settings"]
        key = (settings["processor"], settings["kernels"])
        newest.setdefault(key, {})[settings["case"], line["name"]] = line["value"]
    names = [OURS, *PEERS]
    shown = [name for name in names if any((c.name, name) in one for one in newest.values()
                                           for c in CASES)]  # fmt: skip
    rows: list[Row] = [("tokens/s", *(_TITLES[name] for name in shown), "of vLLM", "of the best")]
    for (processor, kernels), found in newest.items():
        rows.append((f"**{processor}**, `{kernels}`", *("" for _ in range(len(shown) + 2))))
        for case in CASES:
            ratios = [found.get((case.name, name)) for name in ("of vLLM", "of the best")]
            rows.append((
                case.name,
                *(_rate(found, case.name, name) for name in shown),
                *("-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios),
            ))  # fmt: skip
    return rows


def _rate(found: dict[tuple[str, str], float], case: str, name: str) -> str:
    if (case, name) not in found:
        return "-"
    middle, least, most = (found[case, f"{name}{end}"] for end in ("", ", least", ", most"))
    return f"{middle:,.0f} ({least:,.0f}-{most:,.0f})"
