"""Which settings go with ``--tensor-parallel-size``, before a model is known."""

from kunserve.core.errors import ConfigError


def check_ranks(num_ranks: int, device: str, attention: str, num_threads: int) -> None:
    """Raise ConfigError for what several ranks of an instance cannot do."""
    if num_ranks == 1:
        return
    if num_ranks < 1:
        raise ConfigError(f"--tensor-parallel-size must be 1 or more, not {num_ranks}")
    if attention != "fused":
        raise ConfigError(
            f"--attention-backend {attention} computes on one rank only: leave "
            f"--tensor-parallel-size {num_ranks} out"
        )
    if device == "cpu" and num_threads > num_ranks and num_threads % num_ranks:
        raise ConfigError(
            f"--num-threads {num_threads} are for all ranks of an instance together: "
            f"--tensor-parallel-size {num_ranks} does not divide them"
        )


def check_rank_weights(num_ranks: int, quantization: str) -> None:
    """Raise ConfigError for weights that are to stay quantised on several ranks."""
    if num_ranks > 1 and quantization not in ("none", "auto"):
        raise ConfigError(
            f"--tensor-parallel-size {num_ranks}: quantised weights are expanded on several "
            f"ranks, so leave --quantization {quantization} out"
        )


def check_expert_ranks(num_ranks: int, enable_expert_parallel: bool) -> None:
    """Raise ConfigError for experts that are to be spread over one rank."""
    if enable_expert_parallel and num_ranks == 1:
        raise ConfigError(
            "--enable-expert-parallel spreads experts over the ranks of each instance: it needs "
            "--tensor-parallel-size of 2 or more"
        )
