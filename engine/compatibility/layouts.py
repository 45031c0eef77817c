"""Layout x model: what cannot be divided, which stages cannot be, what experts ask for."""

from isoloss.engine.compatibility.rule import Rule, divisors

LAYOUT_AND_MODEL = (
    Rule(
        "parallel.tp",
        lambda s: s.arch.num_heads % s.layout.tp > 0,
        lambda s: f"does not divide the model's {s.arch.num_heads} attention heads",
        lambda s: divisors(s.arch.num_heads),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.arch.num_kv_heads % s.layout.tp > 0 and s.layout.tp % s.arch.num_kv_heads > 0,
        lambda s: f"neither divides nor is a multiple of the model's {s.arch.num_kv_heads} key/value heads",
        lambda s: divisors(s.arch.num_kv_heads),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.dense and s.arch.intermediate_size % s.layout.tp > 0,
        lambda s: f"does not divide the model's intermediate_size {s.arch.intermediate_size}",
        lambda s: divisors(s.arch.intermediate_size),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.arch.critic and s.arch.hidden_size % s.layout.tp > 0,
        lambda s: f"does not divide the hidden_size {s.arch.hidden_size} that the critic's value head reads",
        lambda s: divisors(s.arch.hidden_size),
    ),
    Rule(
        "parallel.ulysses",
        lambda s: s.heads % s.layout.ulysses > 0,
        lambda s: (
            f"does not divide the {s.heads} attention heads of a TP rank ({s.arch.num_heads} heads / tp {s.layout.tp})"
        ),
        lambda s: f"{divisors(s.heads)}, and parallel.ring for more context ranks",
    ),
)

STAGES = (
    Rule(
        "parallel.pp",
        lambda s: s.stages > s.arch.num_layers,
        lambda s: f"x vpp={s.layout.vpp} makes more stages than the model's {s.arch.num_layers} layers",
        lambda s: f"use at most {s.arch.num_layers} stages",
    ),
    Rule(
        "parallel.stage_layers",
        lambda s: bool(s.parallel.stage_layers) and len(s.parallel.stage_layers) != s.stages,
        lambda s: (
            f"names {len(s.parallel.stage_layers)} stages, and pp={s.layout.pp} x vpp={s.layout.vpp} makes {s.stages}"
        ),
        "give one number for each, or leave it at []",
    ),
    Rule(
        "parallel.stage_layers",
        lambda s: bool(s.parallel.stage_layers) and sum(s.parallel.stage_layers) != s.arch.num_layers,
        lambda s: f"adds up to {sum(s.parallel.stage_layers)}, not to the model's {s.arch.num_layers} layers",
        "change a number, or leave it at []",
    ),
)

EXPERTS = (
    *(
        Rule(
            f"parallel.{key}",
            lambda s, key=key: not s.sparse and getattr(s.layout, key) > 1,
            "is for mixture-of-experts models and this one is dense",
            "set it to 1",
        )
        for key in ("ep", "etp")
    ),
    Rule(
        "parallel.sequence_parallel",
        lambda s: s.sparse and s.layout.tp > 1 and not s.layout.sequence_parallel,
        "does not work with experts and parallel.tp > 1: every TP rank would send the same tokens to the experts",
        "leave it at null",
    ),
    Rule(
        "parallel.ep",
        lambda s: s.sparse and s.experts.count % s.layout.ep > 0,
        lambda s: f"does not divide the model's {s.experts.count} experts",
        lambda s: divisors(s.experts.count),
    ),
    Rule(
        "parallel.etp",
        lambda s: s.sparse and s.experts.intermediate_size % s.layout.etp > 0,
        lambda s: f"does not divide the model's expert width {s.experts.intermediate_size}",
        lambda s: divisors(s.experts.intermediate_size),
    ),
    Rule(
        "parallel.tp",
        lambda s: s.sparse and s.experts.shared_size % s.layout.tp > 0,
        lambda s: f"does not divide the model's shared expert's width {s.experts.shared_size}",
        lambda s: divisors(s.experts.shared_size),
    ),
    Rule(
        "parallel.etp",
        lambda s: s.sparse and s.layout.etp > 1 and s.arch.linear_bias,
        "does not work with biases in the experts",
        "set it to 1",
    ),
)
