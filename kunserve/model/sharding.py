"""One model over the ranks of an instance (tensor parallelism): what each of them holds.

A rank has a run of the query heads, the KV heads that these need, a run of the MLP's inner columns
and a run of the vocabulary. All ranks hold equally many, so that their memories are alike.
"""

from dataclasses import replace

from kunserve.core.config import InstanceConfig
from kunserve.core.errors import ConfigError
from kunserve.core.layout import VocabRange
from kunserve.model.experts import Experts
from kunserve.model.spec import ModelSpec

_VOCAB_ROWS = 16
"""Ranks have whole runs of so many rows of the vocabulary, but for the last."""


def spread_over_ranks(spec: ModelSpec, config: InstanceConfig) -> ModelSpec:
    """The model as the ranks of such an instance have it (``--enable-expert-parallel``).

    Raises ConfigError for a model without experts.
    """
    if not config.enable_expert_parallel or config.tensor_parallel_size == 1:
        return spec
    if spec.experts is None:
        raise ConfigError(
            f"--enable-expert-parallel: {spec.name} has no experts; without the flag "
            f"--tensor-parallel-size {config.tensor_parallel_size} parts its matrices"
        )
    return replace(spec, experts=replace(spec.experts, is_spread=True))


def check_shardable(spec: ModelSpec, num_ranks: int) -> None:
    """Raise ConfigError unless the model can be parted over so many ranks."""

    def refuse(why: str) -> ConfigError:
        return ConfigError(f"--tensor-parallel-size {num_ranks}: {why}")

    heads, kv_heads, inner = spec.num_heads, spec.num_kv_heads, spec.intermediate_size
    if heads % num_ranks:
        fits = [str(n) for n in range(2, heads + 1) if not _obstacle(spec, n)]
        could = f"; this model goes over {_listed(fits)}" if fits else ""
        raise refuse(f"{spec.name} has {heads} attention heads, which it does not divide{could}")
    why = _obstacle(spec, num_ranks)
    if why == "kv":
        raise refuse(
            f"{spec.name} has {kv_heads} KV heads; the ranks must divide them, or be a multiple "
            f"of them, so that each rank has one"
        )
    if why == "inner":
        of = "MLP" if spec.experts is None else "MLP of each expert"
        other = "" if spec.experts is None else ", or whole experts: --enable-expert-parallel"
        raise refuse(
            f"the {of} of {spec.name} is {inner} wide; each rank needs the same part of it, in "
            f"whole 16 bytes{other}"
        )
    if why == "shared":
        assert spec.experts is not None
        raise refuse(
            f"the shared expert of {spec.name} is {spec.experts.shared_size} wide; each rank needs "
            f"the same part of it, in whole 16 bytes"
        )
    if why == "experts":
        assert spec.experts is not None
        raise refuse(
            f"{spec.name} has {spec.experts.number} experts, which it does not divide; without "
            f"--enable-expert-parallel each rank has a part of every expert"
        )
    if spec.packed is not None:
        raise refuse("weights that stay quantised lie on one rank only: use --quantization none")


def _obstacle(spec: ModelSpec, num_ranks: int) -> str | None:
    if spec.num_heads % num_ranks:
        return "heads"
    if spec.num_kv_heads % num_ranks and num_ranks % spec.num_kv_heads:
        return "kv"
    experts, inner = spec.experts, spec.intermediate_size
    is_spread = experts is not None and experts.is_spread
    if experts is not None and is_spread and experts.number % num_ranks:
        return "experts"
    if not is_spread and not _goes_over(inner, spec, num_ranks):
        return "inner"
    shared = None if experts is None else experts.shared_size
    if shared is not None and not _goes_over(shared, spec, num_ranks):
        return "shared"
    return None


def _goes_over(width: int, spec: ModelSpec, num_ranks: int) -> bool:
    """Whether ranks have equal parts of so many columns, in whole vectors of the kernels."""
    return width % num_ranks == 0 and width // num_ranks * spec.dtype_bytes % 16 == 0


def _listed(numbers: list[str]) -> str:
    return " or ".join([", ".join(numbers[:-1]), numbers[-1]] if len(numbers) > 1 else numbers)


def spec_of_rank(spec: ModelSpec, num_ranks: int) -> ModelSpec:
    """The shape of what any one rank holds; raises ConfigError for a model that cannot be parted.

    KV heads are held by several ranks where there are more ranks than KV heads.
    """
    check_shardable(spec, num_ranks)
    inner, experts = spec.intermediate_size // num_ranks, spec.experts
    if experts is not None:
        if experts.is_spread:
            inner, experts = spec.intermediate_size, replace(experts, num_owners=num_ranks)
        if experts.shared_size is not None:
            experts = replace(experts, shared_size=experts.shared_size // num_ranks)
    return replace(
        spec,
        num_heads=spec.num_heads // num_ranks,
        num_kv_heads=max(1, spec.num_kv_heads // num_ranks),
        intermediate_size=inner,
        experts=experts,
        vocab_size=_vocab_rows(spec, num_ranks),
    )


def config_of_rank(config: InstanceConfig) -> InstanceConfig:
    """The settings of one rank: its part of memory and threads."""
    num_ranks = config.tensor_parallel_size
    kv_bytes = config.kv_cache_memory_bytes
    return replace(
        config,
        tensor_parallel_size=1,
        enable_expert_parallel=False,
        memory_bytes=config.memory_bytes // num_ranks,
        kv_cache_memory_bytes=None if kv_bytes is None else -(-kv_bytes // num_ranks),
        num_threads=max(1, config.num_threads // num_ranks),
    )


def _vocab_rows(spec: ModelSpec, num_ranks: int) -> int:
    rows = -(-spec.vocab_size // num_ranks)
    return -(-rows // _VOCAB_ROWS) * _VOCAB_ROWS


def vocab_of_rank(spec: ModelSpec, rank: int, num_ranks: int) -> VocabRange:
    """The tokens whose embeddings and logits are a rank's; the last ranks may have fewer, or none.

    ``spec`` is the whole model's.
    """
    rows = _vocab_rows(spec, num_ranks)
    first, end = (min(spec.vocab_size, edge * rows) for edge in (rank, rank + 1))
    return VocabRange(first, end)


def first_expert(experts: Experts | None, rank: int) -> int:
    """Of those that a rank holds; ``experts`` are a rank's. 0 where it has a part of all."""
    return 0 if experts is None or experts.num_owners == 1 else rank * experts.held


def first_kv_head(spec: ModelSpec, rank: int, num_ranks: int) -> int:
    """Of the KV heads that a rank holds, the first. ``spec`` is the whole model's."""
    return rank * spec.num_kv_heads // num_ranks
