"""The table of engines beside each other, from benchmarks/results/peers.jsonl."""

from benchmarks.markdown import Row
from benchmarks.paper.kept_results import figures_of

OURS, RATIO, BEST = "kunserve", "ours / vllm", "ours / best peer"
SHOWN = (OURS, "vllm", "openvino", "llama.cpp")


def peers() -> list[Row]:
    """A block for each processor: tokens/s of every engine (least-most), our ratios, the target."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for line in figures_of("peers"):
        of = line["settings"]
        place = (
            f"{of['processor']}, `{of['kernels']}`, {of['rounds']} round{'s' * (of['rounds'] > 1)}"
        )
        found.setdefault(place, {}).setdefault(of["case"], {})[line["name"]] = line["value"]
    rows: list[Row] = [("", "KunServe", "vLLM 0.32", "OpenVINO", "llama.cpp", "/ vLLM", "/ best")]
    for place, cases in found.items():
        rows.append((f"**{place}**", *[""] * (len(rows[0]) - 1)))
        for case, values in cases.items():
            engines = (_ranged(values, name) for name in SHOWN)
            to_vllm = ""  # not in every run, because it takes long on some processors
            if RATIO in values:
                to_vllm = f"{values[RATIO]:.2f}x ({values['target of that']:.1f})"
            rows.append((case, *engines, to_vllm, f"{values[BEST]:.2f}x"))
    return rows


def _ranged(values: dict[str, float], name: str) -> str:
    if name not in values:
        return ""
    least, most = values[f"{name}, least"], values[f"{name}, most"]
    median = f"{values[name]:,.0f}"
    return median if least == most else f"{median} ({least:,.0f}-{most:,.0f})"
