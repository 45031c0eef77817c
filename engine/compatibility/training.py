"""Load balancing, precision, optimizer and memory: what they ask of model and layout."""

from isoloss.engine.compatibility.rule import Rule
from isoloss.models.mcore import nvidia_apex

MOE = (
    *(
        Rule(
            f"moe.{key}",
            lambda s, key=key, off=off: not s.sparse and getattr(s.config.moe, key) != off,
            "is for mixture-of-experts models and this one is dense",
            f"leave it at {off}",
        )
        for key, off in (("aux_loss", "none"), ("z_loss_coef", 0), ("bias_update_rate", 0))
    ),
    Rule(
        "moe.bias_update_rate",
        lambda s: s.sparse and not s.experts.selection_bias and s.config.moe.bias_update_rate > 0,
        lambda s: f"moves selection biases, and models of the family {s.arch.family} have none",
        "leave it at 0 and balance with moe.aux_loss=sequence",
    ),
)

PRECISION_AND_OPTIMIZER = (
    Rule(
        "parallel.distributed_optimizer",
        lambda s: s.config.train.precision == "fp64" and bool(s.parallel.distributed_optimizer),
        "does not work with train.precision=fp64 (Megatron's distributed optimizer holds fp32 state)",
        "leave it at null",
    ),
    Rule(
        "parallel.gradient_accumulation_fusion",
        lambda s: s.parallel.gradient_accumulation_fusion and s.config.train.precision == "fp64",
        "does not work with train.precision=fp64, whose gradients no fused kernel accumulates",
        "leave it at false",
    ),
    Rule(
        "parallel.gradient_accumulation_fusion",
        lambda s: (
            s.parallel.gradient_accumulation_fusion
            and not s.uses_transformer_engine
            and not nvidia_apex.fuses_weight_gradients()
        ),
        "needs NVIDIA's apex built with --cpp_ext and --cuda_ext, whose fused_weight_gradient_mlp_cuda is not here",
        "leave it at false, or use model.transformer_engine=true, whose layers have a kernel of their own",
    ),
)

MEMORY = (
    *(
        Rule(
            "memory.recompute_modules",
            lambda s, name=name: name in set(s.memory.recompute_modules) - set(s.recompute_modules),
            f"names {name}, and the model has {missing}",
            lambda s: f"use some of {', '.join(s.recompute_modules)}",
        )
        for name, missing in {
            "mlp": "experts in every layer",
            "moe": "no experts",
            "shared_experts": "no shared experts",
            "mla_up_proj": "no latent attention",
        }.items()
    ),
    Rule(
        "memory.recompute_layers",
        lambda s: s.memory.recompute_layers is not None and s.memory.recompute_layers > max(s.stage_layers),
        lambda s: f"is more than the {max(s.stage_layers)} layers of the largest pipeline stage",
        "leave it at null for all of them",
    ),
    Rule(
        "memory.offload_optimizer",
        lambda s: s.memory.offload_optimizer > 0 and s.config.train.precision != "bf16",
        lambda s: f"does not work with train.precision={s.config.train.precision} (it holds fp32 weights of bf16 ones)",
        "use train.precision=bf16, or 0",
    ),
    Rule(
        "memory.offload_optimizer",
        lambda s: s.memory.offload_optimizer > 0 and not s.config.distributed_optimizer,
        "needs the distributed optimizer",
        "leave parallel.distributed_optimizer at null, or use 0",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers >= s.arch.num_layers,
        lambda s: f"is not less than the model's {s.arch.num_layers} layers",
        lambda s: f"use at most {s.arch.num_layers - 1}",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers > 0 and s.layout.pp > 1,
        lambda s: f"does not work in a pipeline (parallel.pp={s.layout.pp})",
        "use 0, or parallel.pp=1",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers > 0 and s.memory.recompute != "none",
        lambda s: f"does not work with memory.recompute={s.memory.recompute}",
        "use one of the two: 0 here, or memory.recompute=none",
    ),
    Rule(
        "memory.offload_layers",
        lambda s: s.memory.offload_layers > 0 and not s.uses_transformer_engine,
        "needs the layers of Transformer Engine, which this run does not use",
        "use 0, or model.transformer_engine=true where it is installed",
    ),
)
