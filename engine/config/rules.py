"""Refuse runs that are impossible: loss x layout x model x precision x optimizer x memory.

Rules about the value of a single key are where the key is defined (engine/config/schema.py), and rules that every
`Layout` fulfils are in parallel/layout.py. This module has all rules that need two of configuration, model and
layout, and every assertion of Megatron-Core that a user could reach. `check` needs no process group, no GPU and no
weights.

Each function yields the refusals of its subject. Where several rules are broken, the user reads the first. So causes
come before their consequences, and a rule may rely on those before it. To add a rule, add it to its subject,
and a run that breaks it to tests/support/faults/impossible.py.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe import fused_a2a

from isoloss.engine.config.help import as_written
from isoloss.engine.config.schema import Config
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.kind import Refusal, SoftmaxAttention, divisors
from isoloss.models.lora import served
from isoloss.models.lora.factors import adapted_weights
from isoloss.models.mcore import transformer_engine
from isoloss.models.mcore.activation_memory import RECOMPUTE_MODULES
from isoloss.models.mcore.stages import stage_layers
from isoloss.models.weights.weight_map import OUTPUT
from isoloss.parallel import Layout, UserError
from isoloss.parallel.ops import flash_attention

# SGLang's classes for these families do not use the sliding_window of config.json.
SEEN_WHOLE_BY_SGLANG = ("mistral", "ministral3", "mixtral")
# SGLang has no classes for these, and runs those of transformers, whose experts a weight sync does not reach.
UNKNOWN_TO_SGLANG = ("mistral4",)

# Reasons why a model lacks a module that only some kinds have.
LACKING = {
    "mlp": "experts in every layer", "mlp_act": "experts in every layer", "moe": "no experts", "experts": "no experts",
    "shared_experts": "no shared experts", "mla_up_proj": "no latent attention",
}  # fmt: skip

Refusals = Iterator[Refusal]


@dataclass(frozen=True)
class Setup:
    """A run before it exists. layout: the layout, with its dp where the world is known."""

    config: Config
    arch: Architecture
    layout: Layout

    def value(self, key: str) -> Any:
        """Return the value that the user set a key to; for a degree, that of the layout."""
        group, name = key.split(".")
        if group == "parallel" and hasattr(self.layout, name):
            return getattr(self.layout, name)
        return getattr(getattr(self.config, group), name)


def check(config: Config, arch: Architecture, layout: Layout) -> None:
    """Raise UserError for the first rule that the setup breaks."""
    setup = Setup(config, arch, layout)
    for subject in SUBJECTS:
        for key, why, remedy in subject(setup):
            raise UserError(f"{key}={as_written(setup.value(key))} {why}; {remedy}")


def attention_and_mlp(setup: Setup) -> Refusals:
    """Yield refusals of the kinds in `models/kinds`, tensor parallelism first: other axes divide its shares."""
    arch, tp = setup.arch, setup.layout.tp
    kinds = (*arch.attentions, *(mlp for mlp in arch.mlps if mlp.experts is None))
    refusals = [refusal for kind in kinds for refusal in kind.refusals(setup.layout)]
    yield from (refusal for refusal in refusals if refusal[0] == "parallel.tp")
    if arch.critic and arch.hidden_size % tp:
        why = f"does not divide the hidden_size {arch.hidden_size} that the critic's value head reads"
        yield "parallel.tp", why, divisors(arch.hidden_size)
    yield from (refusal for refusal in refusals if refusal[0] != "parallel.tp")


def shared_prefixes(setup: Setup) -> Refusals:
    if not setup.config.batch.share_prefixes:
        return
    if setup.config.parallel.cp_kernel != "isoloss":
        why = f"is not known to parallel.cp_kernel={setup.config.parallel.cp_kernel}, which takes whole documents"
        yield "batch.share_prefixes", why, "leave it at null, or set parallel.cp_kernel=isoloss"


def shares_prefixes(config: Config) -> bool:
    """Return batch.share_prefixes, or its default where it is null."""
    if config.batch.share_prefixes is not None:
        return config.batch.share_prefixes
    return config.samples_begin_alike and config.parallel.cp_kernel == "isoloss"


def generation(setup: Setup) -> Refusals:
    """Yield refusals of rollout keys for the trained model. Only reinforcement learning has a rollout."""
    rollout = getattr(setup.config, "rollout", None)
    if rollout is None:
        return
    if rollout.backend == "megatron" and setup.config.parallel.cp_kernel != "isoloss":
        why = f"is not known to parallel.cp_kernel={setup.config.parallel.cp_kernel}"
        yield "rollout.backend", why, "use rollout.backend=transformers or sglang"
    if rollout.routing_replay and setup.arch.experts is None:
        yield "rollout.routing_replay", "is for mixture-of-experts models and this one is dense", "set it to false"
    family, longest = setup.arch.family, min(setup.config.data.max_length, setup.arch.max_positions)
    window = min((kind.window for kind in setup.arch.attentions if kind.window), default=longest)
    if rollout.backend == "sglang" and family in SEEN_WHOLE_BY_SGLANG and window < longest:
        why = f"lets a token of {family} see all of up to {longest} tokens, and the model's sliding_window is {window}"
        remedy = f"set data.max_length to {window}, or sliding_window to null in config.json"
        yield "rollout.backend", why, f"{remedy}, or rollout.backend=megatron"
    if rollout.backend == "sglang" and family in UNKNOWN_TO_SGLANG:
        why = f"has no class for {family}, and would go on with the experts that it began with"
        yield "rollout.backend", why, "use rollout.backend=megatron"


def stages(setup: Setup) -> Refusals:
    num_layers, pp, vpp = setup.arch.num_layers, setup.layout.pp, setup.layout.vpp
    chosen = setup.config.parallel.stage_layers
    if pp * vpp > num_layers:
        why = f"x vpp={vpp} makes more stages than the model's {num_layers} layers"
        yield "parallel.pp", why, f"use at most {num_layers} stages"
    if chosen and len(chosen) != pp * vpp:
        why = f"names {len(chosen)} stages, and pp={pp} x vpp={vpp} makes {pp * vpp}"
        yield "parallel.stage_layers", why, "give one number for each, or leave it at []"
    if chosen and sum(chosen) != num_layers:
        why = f"adds up to {sum(chosen)}, not to the model's {num_layers} layers"
        yield "parallel.stage_layers", why, "change a number, or leave it at []"


def mixture_of_experts(setup: Setup) -> Refusals:
    for mlp in setup.arch.mlps:
        yield from mlp.refusals(setup.layout) if mlp.experts else ()
    for key, degree in (("parallel.ep", setup.layout.ep), ("parallel.etp", setup.layout.etp)):
        if degree > 1 and setup.arch.experts is None:
            yield key, "is for mixture-of-experts models and this one is dense", "set it to 1"


def load_balancing(setup: Setup) -> Refusals:
    moe, experts = setup.config.moe, setup.arch.experts
    if experts is None:
        for name, off in (
            ("aux_loss", "none"), ("z_loss_coef", 0), ("bias_update_rate", 0), ("dispatcher", "alltoall"),
            ("dispatch_bound", None),
        ):  # fmt: skip
            if getattr(moe, name) != off:
                why, shown = "is for mixture-of-experts models and this one is dense", "null" if off is None else off
                yield f"moe.{name}", why, f"leave it at {shown}"
    elif moe.bias_update_rate > 0 and not experts.selection_bias:
        why = f"moves selection biases, and models of the family {setup.arch.family} have none"
        yield "moe.bias_update_rate", why, "leave it at 0 and balance with moe.aux_loss=sequence"


def dispatch_bound(setup: Setup) -> Refusals:
    config, arch = setup.config, setup.arch
    if config.moe.dispatch_bound is None:
        return
    key, remedy = "moe.dispatch_bound", "leave it at null"
    if setup.layout.ep == 1:
        yield key, "is of messages between ranks of parallel.ep, and here it is 1", remedy
    if config.moe.dispatcher != "alltoall":
        yield key, f"does not work with moe.dispatcher={config.moe.dispatcher}, which has messages of its own", remedy
    if not config.kernels.grouped_experts or config.model.transformer_engine:
        why = "needs the experts of kernels.grouped_experts, which are switched off here"
        yield key, why, "set kernels.grouped_experts=true and model.transformer_engine=false, or leave it at null"
    if arch.experts and (arch.experts.bias or arch.experts.activation == "clamped_swiglu"):
        yield key, f"does not work with the experts of {arch.family}, which run one by one", remedy


def dispatcher(setup: Setup) -> Refusals:
    chosen, precision = setup.config.moe.dispatcher, setup.config.train.precision
    if chosen == "alltoall":
        return
    key, remedy = "moe.dispatcher", "use moe.dispatcher=alltoall"
    if setup.layout.ep * setup.layout.etp == 1:
        yield key, "sends tokens to other ranks, and here every rank has all experts", remedy
    if precision != "bf16":
        yield key, f"does not work with train.precision={precision}, which its kernels do not have", remedy
    # HybridEP is a branch of DeepEP's repository; both were read, not run.
    if not (fused_a2a.HAVE_HYBRIDEP if chosen == "hybridep" else fused_a2a.HAVE_DEEP_EP):
        yield key, "needs the package deep_ep with its kernels, which does not import here", f"install it, or {remedy}"


def precision_and_optimizer(setup: Setup) -> Refusals:
    parallel, fp64 = setup.config.parallel, setup.config.train.precision == "fp64"
    if fp64 and parallel.distributed_optimizer:
        why = "does not work with train.precision=fp64 (Megatron's distributed optimizer holds fp32 state)"
        yield "parallel.distributed_optimizer", why, "leave it at null"
    if parallel.overlap_param_gather and not setup.config.distributed_optimizer:
        why = "is for the distributed optimizer, whose ranks step a piece of the weights each"
        yield "parallel.overlap_param_gather", why, "leave it at null"
    if parallel.grad_reduce_dtype == "bf16" and setup.config.train.precision != "bf16":
        why = f"does not work with train.precision={setup.config.train.precision}, whose weights need wider gradients"
        yield "parallel.grad_reduce_dtype", why, "use train.precision=bf16, or fp32"
    if fp64 and parallel.gradient_accumulation_fusion:
        why = "does not work with train.precision=fp64, whose gradients Megatron's layers do not add up themselves"
        yield "parallel.gradient_accumulation_fusion", why, "leave it at null"


def kernels(setup: Setup) -> Refusals:
    if setup.config.kernels.attention == "fa3" and not flash_attention.has_fa3():
        why = "needs the package flash_attn_interface and PyTorch 2.11, and one of them is not here"
        yield "kernels.attention", why, "install it, or use auto"


def transformer_engine_layers(setup: Setup) -> Refusals:
    """docs/transformer_engine.md names the sources, also of the attention's rules."""
    if not setup.config.model.transformer_engine:
        return
    key, own_layers = "model.transformer_engine", "use model.transformer_engine=false"
    version, oldest = transformer_engine.installed(), transformer_engine.OLDEST
    if version is None:
        why = "needs the package transformer_engine, which does not import here"
        yield key, why, f"install it, or {own_layers}"
    elif version < oldest:
        why = f"needs Transformer Engine {oldest}, and here is {version}"
        yield key, why, f"install a newer one, or {own_layers}"
    if setup.config.train.precision == "fp64":
        why = "does not work with train.precision=fp64, which its kernels do not have"
        yield key, why, f"{own_layers}, or train.precision=fp32 or bf16"


def transformer_engine_attention(setup: Setup) -> Refusals:
    arch, kernel, precision = setup.arch, setup.config.parallel.cp_kernel, setup.config.train.precision
    if kernel == "isoloss":
        return
    key, own_kernel = "parallel.cp_kernel", "use parallel.cp_kernel=isoloss"
    if not setup.config.model.transformer_engine:
        why = "is a kernel of Transformer Engine, which this run does not use"
        yield key, why, f"{own_kernel}, or model.transformer_engine=true"
    if precision != "bf16":
        why = f"does not work with train.precision={precision}, which no fused attention has"
        yield key, why, f"{own_kernel}, or train.precision=bf16"
    splits_tokens = setup.layout.context > 1  # with one context rank, its kernels for several do nothing more
    version, since = transformer_engine.installed(), transformer_engine.SPLITS_PACKED_ROWS_SINCE
    assert version is not None, "an earlier rule asks for a version"
    if splits_tokens and version < since[kernel]:
        why = f"splits packed rows from Transformer Engine {since[kernel]} on, and here is {version}"
        yield key, why, f"use {', '.join(name for name in since if version >= since[name])} or isoloss"
    yield from ((key, why, own_kernel) for kind in arch.attentions for why in kind.fused_kernel_refusals(arch.family))
    if splits_tokens and kernel in ("p2p", "a2a+p2p") and any(kind.window for kind in arch.attentions):
        yield key, "has no attention windows", "use parallel.cp_kernel=a2a, all_gather or isoloss"


def transformer_engine_context_ranks(setup: Setup) -> Refusals:
    layout, kernel = setup.layout, setup.config.parallel.cp_kernel
    if kernel in ("p2p", "all_gather") and layout.ulysses > 1:
        why = f"divides heads, and parallel.cp_kernel={kernel} exchanges keys and values only"
        yield "parallel.ulysses", why, f"set it to 1, and parallel.ring to {layout.context}"
    if kernel == "a2a" and layout.ring > 1:
        why = "passes keys and values round, and parallel.cp_kernel=a2a exchanges heads only"
        yield "parallel.ring", why, f"set it to 1, and parallel.ulysses to {layout.context}"
    softmax = [kind for kind in setup.arch.attentions if isinstance(kind, SoftmaxAttention)]
    for kind in softmax if kernel in ("a2a", "a2a+p2p") else ():
        rank_kv_heads = max(kind.kv_heads // layout.tp, 1)  # tp ranks beyond their number share one
        if rank_kv_heads % layout.ulysses:
            why = f"does not divide the {rank_kv_heads} key/value heads of a TP rank"
            remedy = f"{divisors(rank_kv_heads)}, or parallel.cp_kernel=isoloss"
            yield "parallel.ulysses", f"{why}, which parallel.cp_kernel={kernel} does not repeat", remedy


def recomputation(setup: Setup) -> Refusals:
    memory, arch = setup.config.memory, setup.arch
    held = {module for kind in arch.kinds for module in kind.recomputes}
    lacking = {module: what for module, what in LACKING.items() if module not in held}
    for module, what in lacking.items():
        if module in memory.recompute_modules:
            usable = ", ".join(name for name in RECOMPUTE_MODULES if name not in lacking)
            yield "memory.recompute_modules", f"names {module}, and the model has {what}", f"use some of {usable}"
    if memory.recompute_layers is not None:
        largest = max(stage_layers(arch, setup.layout, setup.config.parallel.stage_layers))
        if memory.recompute_layers > largest:
            why = f"is more than the {largest} layers of the largest pipeline stage"
            yield "memory.recompute_layers", why, "leave it at null for all of them"


def offloading(setup: Setup) -> Refusals:
    memory, num_layers, precision = setup.config.memory, setup.arch.num_layers, setup.config.train.precision
    if memory.offload_optimizer > 0 and precision != "bf16":
        why = f"does not work with train.precision={precision} (it holds fp32 weights of bf16 ones)"
        yield "memory.offload_optimizer", why, "use train.precision=bf16, or 0"
    if memory.offload_optimizer > 0 and not setup.config.distributed_optimizer:
        remedy = "leave parallel.distributed_optimizer at null, or use 0"
        yield "memory.offload_optimizer", "needs the distributed optimizer", remedy
    if memory.offload_optimizer > 0 and setup.config.parallel.grad_reduce_dtype == "bf16":
        why = "does not work with parallel.grad_reduce_dtype=bf16 (what is stepped in CPU memory takes fp32 gradients)"
        yield "memory.offload_optimizer", why, "use parallel.grad_reduce_dtype=fp32, or 0"
    if memory.offload_optimizer > 0 and setup.config.parallel.overlap_param_gather:
        why = "does not work with memory.offload_optimizer (weights come from CPU memory after the step)"
        yield "parallel.overlap_param_gather", why, "leave it at null"
    if memory.offload_layers == 0:
        return
    key = "memory.offload_layers"
    if memory.offload_layers >= num_layers:
        yield key, f"is not less than the model's {num_layers} layers", f"use at most {num_layers - 1}"
    if setup.layout.pp > 1:
        yield key, f"does not work in a pipeline (parallel.pp={setup.layout.pp})", "use 0, or parallel.pp=1"
    if memory.recompute != "none":
        remedy = "use one of the two: 0 here, or memory.recompute=none"
        yield key, f"does not work with memory.recompute={memory.recompute}", remedy
    if not setup.config.model.transformer_engine:
        why = "needs the layers of Transformer Engine, which this run does not use"
        yield key, why, "use 0, or model.transformer_engine=true where it is installed"


def adapters(setup: Setup) -> Refusals:
    config, lora = setup.config, setup.config.lora
    if lora.rank == 0:
        return
    weights = adapted_weights(setup.arch, lora.targets)
    if lora.expert_rank is not None and not any(weight.expert is not None for weight in weights):
        yield "lora.expert_rank", "is for experts that a router chooses, and none gets an adapter", "leave it at null"
    if config.model.transformer_engine:
        why = "builds layers that compute no adapters (lora.rank)"
        yield "model.transformer_engine", why, "use model.transformer_engine=false"
    if config.moe.bias_update_rate > 0:
        why = "moves selection biases of the model, which is frozen under an adapter (lora.rank)"
        yield "moe.bias_update_rate", why, "set it to 0"
    grouped = config.kernels.grouped_experts and config.train.precision == "bf16"
    if grouped and lora.rank_of(expert=True) % 8 and any(weight.expert is not None for weight in weights):
        why = f"needs rows of 16 bytes, and adapters of experts have rank {lora.rank_of(expert=True)} (lora.rank)"
        yield "kernels.grouped_experts", why, "use a multiple of 8 (lora.expert_rank), or kernels.grouped_experts=false"
    if config.parallel.gradient_accumulation_fusion:
        why = "is for weights of the model, which is frozen under an adapter (lora.rank)"
        yield "parallel.gradient_accumulation_fusion", why, "leave it at null"
    empty = _stage_without({weight.layer for weight in weights}, setup)
    if empty is not None:
        why = f"gives no adapter to any layer of pipeline stage {empty}, which would have nothing to train"
        yield "lora.targets", why, "name more, such as all, or change parallel.pp or parallel.stage_layers"
    if config.parallel.overlap_param_gather:
        why = "lets layers wait for their own weights, and an adapter's (lora.rank) are gathered at once"
        yield "parallel.overlap_param_gather", why, "leave it at null"
    rollout = getattr(config, "rollout", None)
    tied = setup.arch.tie_embeddings and any(weight.name == OUTPUT for weight in weights)
    if tied and rollout is not None and rollout.backend == "transformers":
        why = "names lm_head, which is the embedding too, and rollout.backend=transformers is sent merged weights"
        yield "lora.targets", why, "leave lm_head out, or use rollout.backend=megatron"
    if rollout is not None and rollout.backend == "sglang":
        yield from served.refusals(setup.arch, lora)
        if config.model.from_scratch:
            why = "makes weights that no server has, and with an adapter (lora.rank) no weights are sent"
            yield "model.from_scratch", why, "set it to false, or use rollout.backend=megatron"


def _stage_without(layers: Set[int | None], setup: Setup) -> int | None:
    """Return the first rank of the pipeline that holds none of these layers."""
    pp, first = setup.layout.pp, 0
    held = [False] * pp
    for stage, count in enumerate(stage_layers(setup.arch, setup.layout, setup.config.parallel.stage_layers)):
        held[stage % pp] |= not layers.isdisjoint(range(first, first + count))
        held[stage % pp] |= None in layers and first + count == setup.arch.num_layers  # the output matrix
        first += count
    return held.index(False) if False in held else None


SUBJECTS = (
    attention_and_mlp,
    shared_prefixes,
    generation,
    stages,
    mixture_of_experts,
    load_balancing,
    dispatch_bound,
    dispatcher,
    precision_and_optimizer,
    kernels,
    transformer_engine_layers,
    transformer_engine_attention,
    transformer_engine_context_ranks,
    recomputation,
    offloading,
    adapters,
)
