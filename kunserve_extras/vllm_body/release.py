"""All that is used of vLLM, and may be otherwise in another release.

Two of its module's names are replaced: what chooses a matrix's kernel, and which end of a pipeline
this process is. One step at a time in a process, because its context is a global.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import utils as gemm_choice
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.sequence import IntermediateTensors
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kunserve.core.errors import UnsupportedModel
from kunserve.core.layout import LayerRange
from kunserve.engine.attention import StepBatch
from kunserve.engine.cpu.kernels.ops import Finish
from kunserve_extras.vllm_body.attention import Heads, PagedAttention
from kunserve_extras.vllm_body.experts import (
    FINISHES,
    add_experts,
    are_known,
    put_experts_in_panels,
)
from kunserve_extras.vllm_body.matrices import HeadProduct, is_known, put_in_panels
from kunserve_extras.vllm_body.repeats import Known, RepeatedLayer, Rooms
from kunserve_extras.vllm_body.short_ways import gated, normed
from kunserve_extras.vllm_body.step_arrays import StepArrays

_CPU = torch.device("cpu")
_FINISH = "kunserve_finish"
"""Of a module: what its product does with what it finds, where it does anything."""
_KNOWN = Known.of(
    [f"_C::{name}" for name in ("rotary_embedding", "silu_and_mul", "gelu_tanh_and_mul")],
    ["vllm_ir::rms_norm", "vllm_ir::fused_add_rms_norm"],
)
"""Its operations that read nothing but their arguments."""
Hop = tuple[torch.Tensor, ...]
"""What a stage gives to the next one: [tokens, hidden] each."""
Run = Callable[[LayerRange, torch.Tensor | None, Hop | None], Hop]
"""Layers of a step, from its token ids [tokens] or a hop; all of them end in normalised rows."""


class _Ends:
    """In place of the pipeline's group: which end of it the next call computes."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.is_first_rank = True
        self.is_last_rank = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.group, name)


@cache
def _world() -> _Ends:
    """A group of this process alone, made once, and what is replaced."""
    # Before vLLM does, which would leave a file or open a port for it.
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    ends = _Ends(parallel_state.get_pp_group())
    assert parallel_state._PP is not None and gemm_choice.dispatch_cpu_unquantized_gemm
    parallel_state._PP = ends
    gemm_choice.dispatch_cpu_unquantized_gemm = _choose_product
    return ends


def _enter_world(config: VllmConfig) -> None:
    """The same for a model that is about to be made: one with experts needs a group for them."""
    ends = _world()
    if config.model_config.is_moe and parallel_state._EP is None:  # another model came first
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(1, 1)
        ends.group, parallel_state._PP = parallel_state.get_pp_group(), ends
    ends.is_first_rank = ends.is_last_rank = True


def _choose_product(module: nn.Module, remove_weight: bool) -> None:
    """What a module of the model multiplies by; called once its weights are loaded."""
    weight = module.weight
    if isinstance(module, VocabParallelEmbedding):
        module.cpu_linear = HeadProduct() if is_known(weight) else nn.functional.linear
    elif weight.ndim == 2:  # experts have their own
        known = remove_weight and is_known(weight)
        finish = getattr(module, _FINISH, Finish.STORE)
        assert known or finish is Finish.STORE, module
        module.cpu_linear = put_in_panels(weight.data, finish) if known else nn.functional.linear


class _OurExperts(CPUUnquantizedExperts):  # type: ignore[misc]
    """In place of vLLM's, where our kernels know how."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        put_experts_in_panels(layer.w13_weight.data, layer.w2_weight.data)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        *_: Any,
        apply_router_weight_on_input: bool,
        **__: Any,
    ) -> None:
        weights = torch.ones_like(topk_weights) if apply_router_weight_on_input else topk_weights
        finish = FINISHES[activation.value]
        output.copy_(add_experts(hidden_states, w1, w2, weights, topk_ids, finish))


def _choose_experts(layer: nn.Module, method: UnquantizedFusedMoEMethod) -> None:
    """What a layer's experts are multiplied by; called before its weights are arranged."""
    is_plain = method.moe.activation.value in FINISHES and not method.moe.has_bias
    if is_plain and are_known(layer.w13_weight, layer.w2_weight):
        method.experts_cls = _OurExperts


def _norm(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """By the parameter that is the module's at the time: pieces may put another in its place."""
    return normed(norm.weight.data, norm.variance_epsilon, x, residual)


def _gate_in_product(part: nn.Module) -> None:
    """A layer whose gate's rows and others go through SiLU does so as they are multiplied."""
    product: Any = getattr(part, "gate_up_proj", None)
    gate: Any = getattr(part, "act_fn", None)
    is_pair = type(product) is MergedColumnParallelLinear and len(product.output_sizes) == 2
    weight = getattr(product, "weight", None)  # quantised ones have others
    if is_pair and type(gate) is SiluAndMul and weight is not None and is_known(weight):
        setattr(product, _FINISH, Finish.SWIGLU)
        gate._forward_method = _as_given


def _as_given(x: torch.Tensor) -> torch.Tensor:
    return x


def _heads(attention: Attention) -> Heads | None:
    """What our kernels need to know of a layer's attention, where they do all that vLLM's would."""
    impl = attention.impl
    numbers = attention.num_heads, attention.num_kv_heads, attention.head_size
    heads = Heads(*numbers, impl.scale, impl.logits_soft_cap)
    is_plain = (
        all(one is None for one in (attention.query_quant, impl.sinks, impl.alibi_slopes))
        and not impl.is_fp8_kv_cache
        and attention.head_size == attention.head_size_v
    )
    return heads if is_plain and heads.are_known else None


def _take_short_ways(module: nn.Module) -> None:
    """Fewer operations for the same thing: a compiled model, which ours is not, would fuse them."""
    for part in module.modules():
        if type(part) is RMSNorm and part.pass_weight and part.variance_size_override is None:
            part._forward_method = partial(_norm, part)
        elif type(part) is SiluAndMul and hasattr(torch.ops._C, "silu_and_mul"):
            part._forward_method = partial(gated, torch.ops._C.silu_and_mul)
        elif type(part) is Attention:
            part.use_direct_call = True
    for part in module.modules():
        _gate_in_product(part)


def open_model(folder: Path, dtype: str, block_size: int) -> "Model":
    """A model without weights. Raises UnsupportedModel for what vLLM, or this body, cannot open."""
    try:
        config = EngineArgs(
            model=str(folder),
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=True,  # a compiled model has its layers and ends baked in
            block_size=block_size,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=1 << 20,  # none is taken
        ).create_engine_config()
        # Else experts are taken in turn from the model's first layer on, whatever a stage computes.
        config.compilation_config.fast_moe_cold_start = False
        config.kernel_config.ir_op_priority.set_default()
        with set_current_vllm_config(config):
            _enter_world(config)
            with set_default_torch_dtype(config.model_config.dtype), _CPU:
                module = initialize_model(config).eval()
            _take_short_ways(module)
    except (ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise UnsupportedModel(f"vLLM cannot open {folder}: {error}") from error
    return Model(config, module)


class Model:
    """A model's modules, and what they are told of each step. Weights and KV are not its own."""

    def __init__(self, config: VllmConfig, module: nn.Module) -> None:
        self._config = config
        self.module = module.requires_grad_(False)
        self._inner, self.layers = _layers_of(module)
        self._attention = self._find_attention()
        self._names = [layer.layer_name for layer in self._attention]
        self._ours: PagedAttention | None = None
        spec = self._attention[0].get_kv_cache_spec(config)
        self.num_kv_heads, self.head_size = spec.num_kv_heads, spec.head_size
        builder = self._attention[0].get_attn_backend().get_builder_cls()
        self._builder = builder(spec, self._names, config, _CPU)
        empty = module.make_empty_intermediate_tensors(1, config.model_config.dtype, _CPU)
        self.hop_names = tuple(empty.tensors)
        shapes = {(tuple(one.shape), one.dtype) for one in empty.tensors.values()}
        wanted = (1, config.model_config.get_hidden_size()), config.model_config.dtype
        if shapes != {wanted}:
            raise UnsupportedModel(f"{self.name} passes more than rows from layer to layer")

    @property
    def name(self) -> str:
        """Of its class."""
        return type(self.module).__name__

    @property
    def attention_kernels(self) -> str:
        """Whose they are. Of vLLM's: for which instructions, by which KV of a block lies."""
        is_ours = None not in {_heads(attention) for attention in self._attention}
        return "of KunServe" if is_ours else f"of vLLM ({self._builder.isa})"

    @property
    def has_own_attention(self) -> bool:
        """Whether vLLM's kernels attend, because ours do not know how."""
        return self._ours is None

    @property
    def is_ours_throughout(self) -> bool:
        """Whether every matrix is multiplied by our kernels: none by vLLM's, as experts are."""
        matrices = [m for m in self.module.modules() if getattr(m, "weight", None) is not None]
        products = [m.cpu_linear for m in matrices if hasattr(m, "cpu_linear")]
        experts = [
            getattr(getattr(m, "quant_method", None), "experts_cls", None)
            for m in self.module.modules()
            if any(p.ndim > 2 for p in m.parameters(recurse=False))
        ]
        return nn.functional.linear not in products and set(experts) <= {_OurExperts}

    def _find_attention(self) -> list[Attention]:
        """Of each layer, in order."""
        registered = self._config.compilation_config.static_forward_context.items()
        found = {name: one for name, one in registered if isinstance(one, AttentionLayerBase)}
        by_layer = {extract_layer_index(name): layer for name, layer in found.items()}
        is_plain = all(
            type(layer) is Attention
            and isinstance(layer.impl, CPUAttentionBackendImpl)
            and layer.kv_sharing_target_layer_name is None
            for layer in found.values()
        )
        if (
            not is_plain
            or len(found) != len(by_layer)
            or set(by_layer) != set(range(len(self.layers)))
        ):
            raise UnsupportedModel(f"{self.name} has layers with another state than plain KV")
        return [by_layer[layer] for layer in range(len(self.layers))]

    def bind_kv(self, units: torch.Tensor) -> None:
        """``units`` [n, KV heads, block, 2 * head_size]: entry e of a table, layer l is e + l."""
        (heads, *others) = {_heads(attention) for attention in self._attention}
        if heads is not None and not others:
            self._ours = ours = PagedAttention(heads, units, len(self.layers))
            for layer, attention in enumerate(self._attention):
                window = max(attention.impl.sliding_window, 0)
                attention.forward = partial(ours.attend, layer, window)
            return
        reach = len(units) - len(self.layers)
        for layer, attention in enumerate(self._attention):
            own = units[layer : reach + layer]
            attention.bind_kv_cache(own)

    def repeat_layers(self, rooms: Rooms) -> list[RepeatedLayer]:
        """From now on a layer's code runs once for each small number of rows, where that will do.

        Call it when KV is bound.
        """
        found = []
        for number, layer in enumerate(self.layers):
            layer.forward = RepeatedLayer(layer, number, rooms, _KNOWN)
            found.append(layer.forward)
        return found

    def head_products(self) -> Iterator[HeadProduct]:
        """What logits come from."""
        for module in self.module.modules():
            if isinstance(product := getattr(module, "cpu_linear", None), HeadProduct):
                yield product

    def load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Into parameters, by the names in files; which of them have got something."""
        return set(self.module.load_weights(tensors))

    def finish(self, modules: Iterable[nn.Module]) -> None:
        """These have been loaded: their weights get the form in which they are computed with."""
        with set_current_vllm_config(self._config), torch.no_grad():
            for module in modules:
                for part in module.modules():
                    method = getattr(part, "quant_method", None)
                    if method is not None and hasattr(method, "moe_kernel"):
                        method.moe_kernel = None  # else what files give counts as arranged
                    if isinstance(method, UnquantizedFusedMoEMethod):
                        _choose_experts(part, method)
                process_weights_after_loading(module, self._config.model_config, _CPU)

    @contextlib.contextmanager
    def step(self, batch: StepBatch, arrays: StepArrays) -> Iterator[Run]:
        """Within, layers of a step can be run."""
        slots, positions = torch.from_numpy(arrays.slots), torch.from_numpy(arrays.positions)
        described: dict[str, Any] = {}
        if self._ours is not None:
            self._ours.begin(batch)
        else:
            described = dict.fromkeys(self._names, self._describe(arrays))
        with (
            torch.no_grad(),
            set_forward_context(
                described,
                self._config,
                num_tokens=len(slots),
                slot_mapping=dict.fromkeys(self._names, slots),
            ),
        ):
            yield partial(self._run, positions)

    def _describe(self, arrays: StepArrays) -> Any:
        """A step for vLLM's attention."""
        starts, lengths, slots, positions = map(
            torch.from_numpy, (arrays.q_starts, arrays.context_lens, arrays.slots, arrays.positions)
        )
        return self._builder.build(
            0,
            CommonAttentionMetadata(
                query_start_loc=starts,
                query_start_loc_cpu=starts,
                seq_lens=lengths,
                num_reqs=len(lengths),
                num_actual_tokens=len(slots),
                max_query_len=arrays.longest_query,
                max_seq_len=arrays.num_positions,
                block_table_tensor=torch.from_numpy(arrays.tables),
                slot_mapping=slots,
                causal=True,
                positions=positions,
            ),
        )

    def _run(
        self,
        positions: torch.Tensor,
        layers: LayerRange,
        token_ids: torch.Tensor | None,
        hop: Hop | None,
    ) -> Hop:
        ends, num_layers = _world(), len(self.layers)
        self._inner.start_layer, self._inner.end_layer = layers
        ends.is_first_rank, ends.is_last_rank = layers.first == 0, layers.end == num_layers
        between = None
        if layers.first:
            assert hop is not None
            between = IntermediateTensors(dict(zip(self.hop_names, hop, strict=True)))
        given = self.module(token_ids, positions, between)
        if layers.end == num_layers:
            return (given,)
        return tuple(given[name] for name in self.hop_names)

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Float32 [n, vocabulary], of rows [n, hidden] that the last layer gave."""
        with torch.no_grad():
            return self.module.compute_logits(rows).float()


def _layers_of(module: nn.Module) -> tuple[nn.Module, nn.ModuleList]:
    """What runs from one layer to another, and the layers."""
    name = type(module).__name__
    for inner in module.modules():
        if hasattr(inner, "start_layer") and hasattr(inner, "end_layer"):
            for child in inner.children():
                if isinstance(child, nn.ModuleList) and len(child) == inner.end_layer:
                    return inner, child
    why = "is vLLM's for models without a class of its own, and " if "Transformers" in name else ""
    raise UnsupportedModel(f"{name} {why}cannot be cut into stages")
