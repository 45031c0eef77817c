"""The configuration of reinforcement learning: its defaults build, and every mistake is one line that can be mended."""

import dataclasses

import pytest

from isoloss.engine.config import parse
from isoloss.engine.rl.config import AlgorithmConfig, RewardConfig, RLConfig, RolloutConfig
from isoloss.parallel import UserError


def build(*changes):
    """A configuration from plain values, with some keys set: ("algorithm.loss", "gspo") ..."""
    values = parse.defaults(RLConfig)
    for key, value in (("model.path", "somewhere"), *changes):
        *groups, name = key.split(".")
        at = values
        for group in groups:
            at = at[group]
        assert name in at, key
        at[name] = value
    return parse.build(RLConfig, values)


def test_the_defaults_build():
    config = build()
    assert config.rollout == RolloutConfig() and config.algorithm == AlgorithmConfig()
    assert config.reward == RewardConfig()
    assert config == RLConfig(config.model)
    assert config.steps_per_batch == 1 and not config.algorithm.uses_reference and not config.algorithm.uses_critic


def test_everything_can_be_set():
    """Each key of the three groups takes another value, from the plain types that YAML has."""
    changes = {
        "rollout": {
            "backend": "sglang", "num_generations": 4, "max_new_tokens": 16, "temperature": "7e-1",
            "eval_temperature": 0, "eval_top_p": 0.9, "concurrency": 3, "max_staleness": 2, "over_sample": 1.5,
            "bucket_mb": 1, "servers": ["http://a:1", "https://b:2"],
            "router": "http://c:3", "weight_sync": "disk", "sync_dir": "shared", "timeout": 5,
            "api_key_env": "SERVERS_KEY",
            "server_command": "serve {model}", "routing_replay": True,
        },
        "algorithm": {
            "advantage": "gae", "loss": "cispo", "clip_low": 1, "clip_high": 0.28, "kl_coef": "1e-3",
            "kl_in": "reward", "kl_estimator": "k1", "kl_aggregation": "seq-mean-token-sum", "entropy_coef": 0.01,
            "entropy_aggregation": "token-mean", "reference_offload": True, "old_logprobs": "rollout",
            "importance_cap": 3, "minibatches": 4, "minibatch_by": "prompt", "epochs": 2,
            "dynamic_sampling": True, "max_draws": 3,
            "on_shortage": "smaller", "mask_truncated": True, "overlong_buffer": 8, "overlong_penalty": 0.5,
            "gamma": 0.99, "gae_lambda": 0.95, "value_clip": None, "critic_lr": 2e-5,
        },
        "reward": {"function": ["math", "mine.py:style"], "weights": [1, 0.2], "timeout": 3, "workers": 1},
    }  # fmt: skip
    config = build(*((f"{group}.{name}", value) for group, keys in changes.items() for name, value in keys.items()))
    for group, keys in changes.items():
        built, default = getattr(config, group), type(getattr(config, group))()
        unchanged = {f.name for f in dataclasses.fields(built)} - keys.keys()
        # These refuse another value of the ones above; they are set in the tests below, and in test_corrections.py.
        corrections = {field for field in unchanged if field.startswith(("importance", "reject"))} | {"veto"}
        refused = {"top_p", "dual_clip", "colocated", "waves", "minibatch_by", "credit", "routing_replay"}
        assert unchanged <= refused | corrections
        for name in keys:
            assert getattr(built, name) != getattr(default, name), name
    assert config.rollout.temperature == 0.7 and config.rollout.servers == ("http://a:1", "https://b:2")
    assert config.eval_temperature == 0 and config.steps_per_batch == 8
    assert config.algorithm.uses_critic and config.algorithm.uses_reference
    assert build(("rollout.temperature", 0.5)).eval_temperature == 0.5
    assert build(("algorithm.dual_clip", 4), ("algorithm.importance", "sequence")).algorithm.dual_clip == 4.0
    gspo = build(("algorithm.loss", "gspo"), ("loss.aggregation", "seq-mean-token-mean"))
    assert gspo.algorithm.dual_clip == 3.0  # the default, which only loss=clip reads
    correct = build(
        ("algorithm.loss", "reinforce"), ("algorithm.importance", "token"), ("algorithm.old_logprobs", "rollout")
    )
    assert correct.algorithm.importance == "token"  # no ratio corrects for the same difference


SERVERS = ("rollout.servers", ["http://a:1"])
ON_SERVERS = (SERVERS, ("rollout.backend", "sglang"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([("rollout.num_generations", 0)], "rollout.num_generations=0 must be at least 1"),
        ([("rollout.max_new_tokens", 0)], "rollout.max_new_tokens=0 must be at least 1"),
        ([("rollout.temperature", 0)], "rollout.temperature=0.0 must be above 0: greedy completions are all alike"),
        ([("rollout.temperature", -1)], "rollout.temperature=-1.0 must be above 0"),
        (
            [("rollout.top_p", 0.9)],
            "rollout.top_p=0.9 must be 1: tokens would come from the nucleus while ratio, KL and",
        ),
        ([("rollout.eval_top_p", 0)], "rollout.eval_top_p=0.0 must be above 0 and at most 1"),
        ([("rollout.eval_top_p", 1.1)], "rollout.eval_top_p=1.1 must be above 0 and at most 1"),
        ([("rollout.eval_temperature", -0.1)], "rollout.eval_temperature=-0.1 must be at least 0, or null"),
        ([("rollout.concurrency", 0)], "rollout.concurrency=0 must be at least 1"),
        ([("rollout.bucket_mb", 0)], "rollout.bucket_mb=0 must be at least 1"),
        ([("rollout.timeout", 0)], "rollout.timeout=0.0 must be positive"),
        ([("rollout.backend", "sglang")], "rollout.servers=[] must name at least one server, such as http://"),
        ([("rollout.backend", "vllm")], "rollout.backend='vllm' is not one of transformers, megatron, sglang"),
        (
            [("rollout.servers", ["node1:30000"])],
            "rollout.servers='node1:30000' is not a URL; it must begin with http://",
        ),
        ([SERVERS, ("rollout.router", "node1:1")], "rollout.router='node1:1' is not a URL; it must begin with http://"),
        ([("reward.function", [])], "reward.function=[] must name at least one function"),
        (
            [("reward.weights", [1, 2])],
            "reward.weights=[1.0, 2.0] must be as many as the 1 of reward.function, or none",
        ),
        ([("reward.timeout", 0)], "reward.timeout=0.0 must be positive"),
        ([("reward.workers", 0)], "reward.workers=0 must be at least 1"),
        ([("algorithm.clip_low", -0.1)], "algorithm.clip_low=-0.1 must not be negative"),
        ([("algorithm.clip_high", -0.1)], "algorithm.clip_high=-0.1 must not be negative"),
        ([("algorithm.clip_low", 1.0)], "algorithm.clip_low=1.0 must be below 1"),
        ([("algorithm.kl_coef", -1)], "algorithm.kl_coef=-1.0 must not be negative"),
        ([("algorithm.entropy_coef", -1)], "algorithm.entropy_coef=-1.0 must not be negative"),
        ([("algorithm.overlong_buffer", -1)], "algorithm.overlong_buffer=-1 must not be negative"),
        ([("algorithm.overlong_penalty", -1)], "algorithm.overlong_penalty=-1.0 must not be negative"),
        (
            [("algorithm.overlong_buffer", 1025)],
            "algorithm.overlong_buffer=1025 is more than rollout.max_new_tokens=1024",
        ),
        ([("algorithm.minibatches", 0)], "algorithm.minibatches=0 must be at least 1"),
        ([("algorithm.epochs", 0)], "algorithm.epochs=0 must be at least 1"),
        ([("algorithm.max_draws", 0)], "algorithm.max_draws=0 must be at least 1"),
        ([("algorithm.gamma", 1.01)], "algorithm.gamma=1.01 must be in [0, 1]"),
        ([("algorithm.gae_lambda", -0.01)], "algorithm.gae_lambda=-0.01 must be in [0, 1]"),
        ([("algorithm.dual_clip", 1)], "algorithm.dual_clip=1.0 must be above 1, or null"),
        (
            [("algorithm.dual_clip", 4), ("algorithm.loss", "cispo")],
            "algorithm.dual_clip=4.0 goes with algorithm.loss=clip (it is cispo); set it to null",
        ),
        (
            [("algorithm.loss", "gspo")],
            "loss.aggregation='token-mean' is not that of algorithm.loss=gspo, whose ratio is one number a sequence",
        ),
        (
            [("algorithm.loss", "gspo"), ("loss.aggregation", "prompt-mean-token-mean")],
            "loss.aggregation='prompt-mean-token-mean' is not that of algorithm.loss=gspo",
        ),
        ([("algorithm.importance_cap", 0)], "algorithm.importance_cap=0.0 must be positive"),
        ([("algorithm.value_clip", 0)], "algorithm.value_clip=0.0 must be positive, or null"),
        ([("algorithm.critic_lr", -1)], "algorithm.critic_lr=-1.0 must not be negative"),
        ([("algorithm.kl_aggregation", "mean")], "algorithm.kl_aggregation='mean' is not one of token-mean, "),
        (
            [("algorithm.entropy_aggregation", "mean")],
            "algorithm.entropy_aggregation='mean' is not one of token-mean, ",
        ),
        (
            [("algorithm.importance", "token"), ("algorithm.old_logprobs", "rollout")],
            "algorithm.importance=token with algorithm.old_logprobs=rollout would count the difference twice",
        ),
        (
            [("algorithm.minibatches", 3)],
            "algorithm.minibatches=3 does not divide the 256 completions of a batch (batch.global_size=32 x "
            "rollout.num_generations=8)",
        ),
        (
            [("rollout.num_generations", 1)],
            "rollout.num_generations=1 must be at least 2: algorithm.advantage=grpo compares completions",
        ),
        (
            [("rollout.num_generations", 1), ("algorithm.advantage", "gae"), ("algorithm.dynamic_sampling", True)],
            "rollout.num_generations=1 must be at least 2: algorithm.dynamic_sampling=true compares completions",
        ),
        (
            [("rollout.max_staleness", 1)],
            "rollout.max_staleness=1 needs servers, which generate while the trainer trains; rollout.backend="
            "transformers takes turns with it: set it to 0, or use rollout.backend=sglang",
        ),
        (
            [("rollout.waves", 2), ("rollout.backend", "megatron")],
            "rollout.waves=2 needs servers, which generate while the trainer trains; rollout.backend=megatron takes "
            "turns with it: set it to 1, or use rollout.backend=sglang",
        ),
        (
            [*ON_SERVERS, ("rollout.max_staleness", 1), ("rollout.colocated", True)],
            "rollout.max_staleness=1 needs servers with GPUs of their own",
        ),
        ([*ON_SERVERS, ("rollout.over_sample", 1.5)], "rollout.over_sample=1.5 leaves partial completions to the next"),
        ([*ON_SERVERS, ("rollout.over_sample", 2.5)], "rollout.over_sample=2.5 must be from 1 to 1.5"),
        (
            [*ON_SERVERS, ("rollout.over_sample", 1.5), ("rollout.max_staleness", 1), ("rollout.waves", 2)],
            "rollout.over_sample=1.5 takes groups in the order in which they finish, and rollout.waves=2",
        ),
        (
            [*ON_SERVERS, ("rollout.max_staleness", 1)],
            "rollout.max_staleness=1 lets older weights make tokens, and with algorithm.importance=none and "
            "algorithm.old_logprobs=train the loss clip would take them for the policy's own: set "
            "algorithm.importance=token",
        ),
        (
            [
                *ON_SERVERS,
                ("rollout.max_staleness", 1),
                ("algorithm.old_logprobs", "rollout"),
                ("algorithm.loss", "reinforce"),
            ],
            "rollout.max_staleness=1 lets older weights make tokens",
        ),
        ([("data.overlong", "truncate")], "data.overlong='truncate' would ask another question; choose error or drop"),
        ([("algorithm.advantage", "ppo")], "algorithm.advantage='ppo' is not one of grpo, dr-grpo, rloo, reinforce++"),
        ([("algorithm.kl_coef", float("nan"))], "algorithm.kl_coef=nan must be a finite number"),
        (
            [("algorithm.dual_clip", 4), ("algorithm.loss", "reinforce")],
            "algorithm.dual_clip=4.0 goes with algorithm.loss=clip (it is reinforce); set it to null",
        ),
        (
            [("rollout.routing_replay", True)],
            "rollout.routing_replay=True needs a backend that says which experts it chose, and rollout.backend="
            "transformers does not: use rollout.backend=megatron or sglang, or set it to false",
        ),
    ],
)
def test_mistakes(changes, said):
    with pytest.raises(UserError) as error:
        build(*changes)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("advantage", ["grpo", "dr-grpo", "rloo", "reinforce++-baseline"])
def test_grouped_advantages_need_a_group(advantage):
    with pytest.raises(UserError, match=rf"algorithm.advantage={advantage.replace('+', '.')} compares"):
        build(("rollout.num_generations", 1), ("algorithm.advantage", advantage))


@pytest.mark.parametrize("advantage", ["reinforce++", "gae"])
def test_the_others_do_not(advantage):
    assert build(("rollout.num_generations", 1), ("algorithm.advantage", advantage)).steps_per_batch == 1


def test_a_misspelt_key_is_told_the_right_one():
    values = parse.defaults(RLConfig) | {"model": {"path": "somewhere"}}
    values["algorithm"] = {"clip_hihg": 0.3}
    with pytest.raises(UserError, match=r"unknown key 'algorithm.clip_hihg'; did you mean 'algorithm.clip_high'"):
        parse.build(RLConfig, values)


@pytest.mark.parametrize(
    "changes",
    [
        [("algorithm.importance", "token")],
        [("algorithm.importance", "sequence")],
        [("algorithm.old_logprobs", "rollout")],
        [("algorithm.old_logprobs", "rollout"), ("algorithm.loss", "mine.py:loss")],
        [("algorithm.old_logprobs", "rollout"), ("algorithm.loss", "reinforce"), ("algorithm.importance", "token")],
    ],
)
def test_stale_tokens_with_a_loss_that_knows_where_they_are_from(changes):
    built = build(*ON_SERVERS, ("rollout.max_staleness", 2), ("rollout.over_sample", 1.25), *changes)
    assert built.overlaps_generation and not build(*ON_SERVERS).overlaps_generation


def test_waves_keep_the_trainer_busy_on_policy_too():
    assert build(*ON_SERVERS, ("rollout.waves", 4)).overlaps_generation
