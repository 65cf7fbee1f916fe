"""The works that the report names: what is printed of each."""


def _arxiv(number: str, title: str, who: str) -> str:
    return f"{who}. {title}. [arXiv:{number}](https://arxiv.org/abs/{number})."


REFERENCES = {
    "kunserve": _arxiv(
        "2412.18169",
        "KunServe: Parameter-centric Memory Management for Efficient Memory Overloading Handling "
        "in LLM Serving. EuroSys '26",
        "Cheng, Lai, Wei, Chen, Chen",
    ),
    "vllm": _arxiv(
        "2309.06180",
        "Efficient Memory Management for Large Language Model Serving with PagedAttention. "
        "SOSP '23",
        "Kwon and others",
    ),
    "infercept": _arxiv(
        "2402.01869",
        "InferCept: Efficient Intercept Support for Augmented Large Language Model Inference. "
        "ICML '24",
        "Abhyankar and others",
    ),
    "llumnix": _arxiv(
        "2406.03243",
        "Llumnix: Dynamic Scheduling for Large Language Model Serving. OSDI '24",
        "Sun and others",
    ),
    "sarathi": _arxiv(
        "2403.02310",
        "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve. OSDI '24",
        "Agrawal and others",
    ),
    "splitwise": _arxiv(
        "2311.18677",
        "Splitwise: Efficient Generative LLM Inference Using Phase Splitting. ISCA '24",
        "Patel and others",
    ),
    "distserve": _arxiv(
        "2401.09670",
        "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language "
        "Model Serving. OSDI '24",
        "Zhong and others",
    ),
    "vidur": _arxiv(
        "2405.05465",
        "Vidur: A Large-Scale Simulation Framework for LLM Inference. MLSys '24",
        "Agrawal and others",
    ),
    "burstgpt": _arxiv(
        "2401.17644",
        "BurstGPT: A Real-world Workload Dataset to Optimize LLM Serving Systems",
        "Wang and others",
    ),
    "longbench": _arxiv(
        "2308.14508",
        "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding",
        "Bai and others",
    ),
    "tokenflow": _arxiv(
        "2510.02758",
        "TokenFlow: Responsive LLM Text Streaming Serving under Request Burst via Preemptive "
        "Scheduling",
        "Chen and others",
    ),
    "andes": _arxiv(
        "2404.16283",
        "Andes: Defining and Enhancing Quality-of-Experience in LLM-Based Text Streaming Services",
        "Liu and others",
    ),
    "sidp": _arxiv(
        "2605.28095",
        "SiDP: Memory-Efficient Data Parallelism for Offline LLM Inference",
        "Zhao, He",
    ),
    "dwdp": _arxiv(
        "2604.01621",
        "DWDP: Distributed Weight Data Parallelism for High-Performance LLM Inference on NVL72",
        "Li and others",
    ),
    "oneiros": _arxiv(
        "2507.11507",
        "Oneiros (first named MIRAGE): KV Cache Optimization through Parameter Remapping for "
        "Multi-tenant LLM Serving",
        "Li and others",
    ),
    "pie": _arxiv("2411.09317", "Pie: Pooling CPU Memory for LLM Inference", "Xu and others"),
    "morphserve": _arxiv(
        "2506.02006",
        "MorphServe: Efficient and Workload-Aware LLM Serving via Runtime Quantized Layer "
        "Swapping and KV Cache Resizing",
        "Su and others",
    ),
    "flying": _arxiv(
        "2602.22593",
        "Flying Serving: On-the-Fly Parallelism Switching for Large Language Model Serving",
        "Gao, Yin, Wang, Dong",
    ),
    "pipelive": _arxiv(
        "2604.12171",
        "PipeLive: Efficient Live In-place Pipeline Parallelism Reconfiguration for Dynamic LLM "
        "Serving",
        "Bai, Islam, Wang, Toosi",
    ),
    "neo": _arxiv(
        "2411.01142",
        "NEO: Saving GPU Memory Crisis with CPU Offloading for Online LLM Inference. MLSys '25",
        "Jiang and others",
    ),
    "slos-serve": _arxiv(
        "2504.08784",
        "SLOs-Serve: Optimized Serving of Multi-SLO LLMs",
        "Chen and others",
    ),
    "fma": "llm-d. Fast Model Actuation: replicas that sleep on a node and are woken. "
    "[github.com/llm-d](https://github.com/llm-d/llm-d).",
    "extensible": "vLLM. Extensible KV cache, pull request 56492 (open when this was written). "
    "[github.com/vllm-project/vllm](https://github.com/vllm-project/vllm/pull/56492).",
}
