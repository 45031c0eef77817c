"""tools.migrate on examples that verl, TRL and slime ship: our keys, worked out by hand, and where every key went."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from isoloss.engine.config.parse import build, defaults, known_keys
from isoloss.engine.config.schema import Config
from isoloss.engine.data.columns import recognised
from isoloss.engine.rl.config import RLConfig
from isoloss.recipes.launch import compose_config
from isoloss.tools.migrate import __main__ as command
from isoloss.tools.migrate import slime, trl, verl
from isoloss.tools.migrate.__main__ import READERS, main
from isoloss.tools.migrate.result import Migration, flat, migrate

EXAMPLES = Path(__file__).parents[1] / "oracles" / "migrate"
SOURCES = {
    "verl_rl": verl.RL,
    "verl_sft": verl.SFT,
    "trl_sft": trl.SFT,
    "trl_grpo": trl.GRPO,
    "slime": slime.SLIME,
}
# What verl and TRL do where nobody says otherwise, and isoloss does not.
TORCH = {"optim.betas": "[0.9,0.999]", "train.precision": "bf16"}
FULL = {"memory.recompute": "full"}  # unless verl trains with Megatron, or slime is not asked to
VERL = TORCH | {"optim.schedule": "constant", "optim.weight_decay": "0.01"}
TRL = TORCH | FULL | {"train.epochs": "3", "train.seed": "42", "checkpoint.every": "500"}
TRL_GRPO = TRL | {"optim.lr": "1e-06", "optim.schedule": "linear"}
GSM8K = {"data.train": "[/home/me/data/gsm8k/train.parquet]", "data.eval": "[/home/me/data/gsm8k/test.parquet]"}
BOTH = {
    "data.train": "[/home/me/data/gsm8k/train.parquet,/home/me/data/math/train.parquet]",
    "data.eval": "[/home/me/data/gsm8k/test.parquet,/home/me/data/math/test.parquet]",
}
SLIME_GRPO = FULL | {
    "data.train": "[/root/dapo-math-17k/dapo-math-17k.jsonl]",
    "data.eval": "[/root/aime-2024/aime-2024.jsonl]",
    "data.columns": "{prompt:prompt,answer:label}",
    "data.max_length": "10240",  # 8192 and our guess of 2048 for the prompt
    "loss.aggregation": "seq-mean-token-mean",
    "loss.count_fully_masked": "true",
    "optim.lr": "1e-06",
    "optim.schedule": "constant",
    "optim.weight_decay": "0.1",
    "optim.betas": "[0.9,0.98]",
    "train.steps": "3000",  # 32 x 8 samples of a rollout are one step of 256
    "train.seed": "1234",
    "train.precision": "bf16",
    "train.eval_every": "20",
    "checkpoint.every": "20",
    "rollout.max_new_tokens": "8192",
    "algorithm.clip_high": "0.28",
    "algorithm.dual_clip": "null",
    "reward.function": "[math]",
}
# Of each example: the file, what is added to it, our recipe, and the keys after it.
MIGRATED = {
    "verl_grpo_fsdp.txt": ([], "grpo", FULL | VERL | GSM8K | {
        "model.path": "Qwen/Qwen3-4B",
        "data.overlong": "drop",
        "batch.global_size": "512",
        "batch.max_tokens": "3000",
        "optim.lr": "1e-06",
        "train.epochs": "15",
        "train.eval_every": "10",  # 5 batches of 512 / 256 steps
        "checkpoint.every": "40",
        "rollout.num_generations": "5",
        "rollout.eval_temperature": "0",
        "algorithm.kl_coef": "0.001",
        "algorithm.minibatches": "2",
    }),
    "verl_grpo_megatron.yaml": ([], "grpo", VERL | BOTH | {
        "model.path": "Qwen/Qwen3-8B",
        "data.max_length": "3072",
        "data.overlong": "drop",
        "batch.global_size": "1024",
        "batch.max_tokens": "24576",
        "parallel.tp": "2",
        "parallel.pp": "2",
        "optim.lr": "1e-06",
        "train.epochs": "15",
        "train.eval_every": "20",  # 5 batches of 1024 / 256 steps
        "checkpoint.every": "80",
        "rollout.num_generations": "5",
        "rollout.max_new_tokens": "2048",
        "rollout.eval_temperature": "0",
        "algorithm.kl_coef": "0.001",
        "algorithm.minibatches": "4",
    }),
    "verl_gspo.txt": ([], "grpo", FULL | VERL | BOTH | {
        "model.path": "Qwen/Qwen3-8B",
        "data.max_length": "10240",
        "data.overlong": "drop",
        "batch.global_size": "512",
        "batch.max_tokens": "20480",
        "loss.aggregation": "seq-mean-token-mean",
        "loss.count_fully_masked": "true",
        "optim.lr": "1e-06",
        "train.epochs": "10",
        "train.eval_every": "40",  # 10 batches of 512 / 128 steps
        "checkpoint.every": "80",
        "rollout.num_generations": "16",
        "rollout.max_new_tokens": "8192",
        "rollout.eval_temperature": "0",
        "algorithm.loss": "gspo",
        "algorithm.clip_low": "0.0003",
        "algorithm.clip_high": "0.0004",
        "algorithm.minibatches": "4",
    }),
    "verl_dapo.txt": ([], "dapo", FULL | TORCH | GSM8K | {
        "model.path": "/home/me/models/Qwen/Qwen2.5-0.5B-Instruct",
        "data.max_length": "3072",
        "batch.global_size": "256",
        "batch.max_tokens": "6144",  # two rows of 3072
        "optim.warmup_steps": "0",  # the preset has the paper's, and its constant schedule
        "optim.weight_decay": "0.01",
        "train.steps": "2",  # one batch of 256 / 128 steps
        "train.epochs": "2",
        "rollout.num_generations": "4",
        "rollout.max_new_tokens": "2048",
        "rollout.eval_temperature": "0",
        "algorithm.minibatches": "2",
        "algorithm.mask_truncated": "false",
        "algorithm.overlong_buffer": "128",
    }),
    "verl_dapo_async.txt": ([], "grpo", FULL | VERL | {
        "model.path": "/home/me/verl/models/Qwen2.5-Math-7B",
        "data.train": "[/home/me/verl/data/dapo-math-17k.parquet]",
        "data.eval": "[/home/me/verl/data/aime-2024.parquet]",
        "data.max_length": "10240",
        "batch.global_size": "512",
        "batch.max_tokens": "81920",  # 20480 on each of 4 ranks that share a row
        "parallel.ulysses": "4",
        "optim.lr": "1e-06",
        "optim.warmup_steps": "160",  # 10 batches of 512 / 32 steps
        "optim.weight_decay": "0.1",
        "train.steps": "1600",
        "train.epochs": "10",
        "train.eval_every": "160",
        "rollout.num_generations": "12",
        "rollout.max_new_tokens": "8192",
        "rollout.eval_temperature": "1",
        "rollout.eval_top_p": "0.7",
        "algorithm.clip_high": "0.28",
        "algorithm.dual_clip": "10",
        "algorithm.minibatches": "16",
        "algorithm.overlong_buffer": "4096",
    }),
    "verl_sft.yaml": ([], "sft", FULL | VERL | GSM8K | {
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "data.max_length": "1024",
        "batch.global_size": "256",
        "optim.lr": "0.0001",
        "train.seed": "1",
    }),
    "trl_sft.yaml": (["processes=8"], "sft", TRL | {
        "model.path": "Qwen/Qwen2.5-0.5B",
        "data.max_length": "1024",
        "data.overlong": "truncate",
        "batch.global_size": "64",  # 8 of each process
        "optim.lr": "0.0001",
    }),
    "trl_gspo.yaml": ([], "grpo", TRL_GRPO | {
        "data.max_length": "2560",  # 512 and our guess of 2048 for the prompt
        "batch.global_size": "4",  # 4 x 8 completions of groups of 8
        "batch.max_tokens": "4096",
        "loss.aggregation": "seq-mean-token-mean",
        "loss.count_fully_masked": "true",
        "rollout.max_new_tokens": "512",
        "algorithm.loss": "gspo",
        "algorithm.clip_low": "0.0003",
        "algorithm.clip_high": "0.0004",
        "algorithm.minibatches": "4",
    }),
    "trl_dr_grpo.yaml": (["processes=8"], "grpo", TRL_GRPO | {
        "data.max_length": "5048",
        "batch.global_size": "1",  # 8 completions, all of one prompt
        "batch.max_tokens": "3000",
        "loss.aggregation": "seq-mean-token-sum-norm",
        "loss.norm_length": "3000",
        "loss.count_fully_masked": "true",
        "rollout.max_new_tokens": "3000",
        "algorithm.dual_clip": "null",
    }),
    "trl_dapo.yaml": ([], "grpo", TRL_GRPO | {
        "data.max_length": "22528",
        "batch.max_tokens": "10485760",
        "rollout.num_generations": "16",
        "rollout.max_new_tokens": "20480",
        "algorithm.clip_high": "0.28",
        "algorithm.dual_clip": "null",
        "algorithm.mask_truncated": "true",
    }),
    "slime_grpo.txt": ([], "grpo", SLIME_GRPO | {
        "model.path": "/root/Qwen3-4B", "parallel.tp": "2", "batch.max_tokens": "9216",
    }),
    "slime_experts.txt": ([], "grpo", SLIME_GRPO | {
        "model.path": "/root/Qwen3-30B-A3B", "parallel.tp": "4", "parallel.ep": "8", "batch.max_tokens": "20480",
    }),
    "slime_sft.txt": ([], "sft", FULL | {
        "model.path": "/root/Qwen3-4B-Base/",
        "data.train": "[/root/openhermes2_5.parquet]",
        "data.max_length": "9216",
        "batch.global_size": "128",
        "batch.max_tokens": "9216",
        "optim.min_lr": "1e-06",
        "optim.weight_decay": "0.1",
        "train.epochs": "3",
        "train.seed": "1234",
        "train.precision": "bf16",
        "checkpoint.every": "1000",
    }),
}  # fmt: skip


def migrated(trainer: str, path: Path | None, *words: str) -> Migration:
    return migrate(*READERS[trainer](path, words))


@pytest.mark.parametrize("name", MIGRATED)
def test_an_example_of_a_trainer_becomes_the_keys_worked_out_by_hand(name):
    words, recipe, keys = MIGRATED[name]
    result = migrated(name.partition("_")[0], EXAMPLES / name, *words)
    assert (result.recipe, result.status) == (recipe, 0)
    assert dict(line.split("=", 1) for line in result.lines) == keys
    kind = Config if recipe == "sft" else RLConfig
    model = [] if "model.path" in keys else ["model.path=MODEL"]
    compose_config(recipe, kind, ["preset=plain", *model, *result.lines])


@pytest.mark.parametrize("name", MIGRATED)
def test_every_key_of_an_example_is_in_one_list(name):
    trainer = name.partition("_")[0]
    source, given, _ = READERS[trainer](EXAMPLES / name, MIGRATED[name][0])
    told = migrate(source, given, []).account
    reasons = [*told.changes, *told.give, *told.without]
    lines = [*told.translated, *told.same, *(shown for shown, _ in reasons), *told.unknown]
    assert sorted(line.split("=", 1)[0] for line in lines) == sorted(given)
    assert all(why for _, why in reasons)


@pytest.mark.parametrize("name", SOURCES)
def test_every_key_that_a_trainer_has_is_known(name):
    names = (EXAMPLES / f"names_{name}.txt").read_text().partition("\n")[2].split()
    assert len(names) > 100 and [key for key in names if SOURCES[name].row_of(key) is None] == []


@pytest.mark.parametrize("name", SOURCES)
def test_a_table_names_keys_of_ours(name):
    source = SOURCES[name]
    decided = {ours.partition("|")[0] for row in source.rows for ours in row.to}
    assert decided | source.ours.keys() <= set(known_keys(RLConfig))
    unseen = source.ours.keys() - decided - {"train.precision", "algorithm.importance_cap"}
    assert unseen <= {"loss.aggregation"}, "a key of ours that no key of theirs decides"


GRPO = ["algorithm.adv_estimator=grpo", "data.train_batch_size=256", "actor_rollout_ref.rollout.n=4"]
ACTOR = "actor_rollout_ref.actor."
TRL_SIZES = ["num_generations=4", "per_device_train_batch_size=8"]
SLIME_SIZES = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--rollout-max-response-len", "100"]


@pytest.mark.parametrize(
    ("trainer", "words", "keys"),
    [
        # verl never reads clip_ratio where both sides have their defaults, and does where they are null.
        ("verl", [*GRPO, f"{ACTOR}clip_ratio=0.3"], {"algorithm.clip_low": None, "algorithm.clip_high": None}),
        ("verl", [*GRPO, f"{ACTOR}clip_ratio=0.3", f"{ACTOR}clip_ratio_low=null"], {"algorithm.clip_low": "0.3"}),
        ("verl", [*GRPO, "algorithm.norm_adv_by_std_in_grpo=False"], {"algorithm.advantage": "dr-grpo"}),
        ("verl", [*GRPO, f"{ACTOR}use_kl_loss=False", f"{ACTOR}kl_loss_coef=0.1"], {"algorithm.kl_coef": None}),
        ("verl", [*GRPO, "algorithm.use_kl_in_reward=True", "algorithm.kl_penalty=mse"],
         {"algorithm.kl_coef": "0.001", "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k2"}),
        ("verl", [*GRPO, f"{ACTOR}policy_loss.loss_mode=clip_cov"], {"algorithm.loss": "losses.py:clip_cov"}),
        ("verl", [*GRPO, "algorithm.rollout_correction.rollout_is=sequence",
                  "algorithm.rollout_correction.rollout_is_threshold=5"],
         {"algorithm.importance": "sequence", "algorithm.importance_cap": "5"}),
        ("verl", [*GRPO, f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor=900"],
         {"loss.aggregation": "seq-mean-token-sum-norm", "loss.norm_length": "900", "loss.count_fully_masked": "true"}),
        ("verl", [*GRPO, f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=50",
                  f"{ACTOR}ppo_mini_batch_size=128"], {"optim.warmup_steps": "10", "train.steps": "100"}),
        ("verl", [*GRPO, f"{ACTOR}megatron.expert_model_parallel_size=4",
            f"{ACTOR}megatron.tensor_model_parallel_size=2"],
         {"parallel.ep": "4", "parallel.etp": "2"}),
        ("trl", [*TRL_SIZES, "loss_type=cispo", "epsilon_high=5"],
         {"algorithm.loss": "cispo", "algorithm.clip_low": "1", "algorithm.clip_high": "4"}),
        ("trl", [*TRL_SIZES, "scale_rewards=False"], {"algorithm.advantage": "dr-grpo"}),
        ("trl", [*TRL_SIZES, "delta=4"], {"algorithm.dual_clip": "4"}),
        ("trl", [*TRL_SIZES, "warmup_ratio=0.1", "max_steps=95"], {"optim.warmup_steps": "10", "train.steps": "95"}),
        ("trl", [*TRL_SIZES, "gradient_accumulation_steps=2", "steps_per_generation=4", "processes=3"],
         {"batch.global_size": "24", "algorithm.minibatches": "2"}),
        ("trl", [*TRL_SIZES, "reward_funcs=[accuracy_reward,my_lib.rewards.brief]"],
         {"reward.function": "[math,my_lib.rewards:brief]"}),
        ("slime", [*SLIME_SIZES, "--num-steps-per-rollout", "2", "--num-rollout", "10", "--save-interval", "5"],
         {"algorithm.minibatches": "2", "train.steps": "20", "checkpoint.every": "10"}),
        ("slime", [*SLIME_SIZES, "--kl-coef", "0.1"], {"algorithm.kl_coef": None}),
        ("slime", [*SLIME_SIZES, "--advantage-estimator", "reinforce_plus_plus", "--kl-coef", "0.1"],
         {"algorithm.kl_coef": "0.1", "algorithm.kl_in": "reward", "algorithm.kl_estimator": "k1"}),
        ("slime", [*SLIME_SIZES, "--eps-clip", "0.3"], {"algorithm.clip_low": "0.3", "algorithm.clip_high": "0.3"}),
        ("slime", [*SLIME_SIZES, "--use-tis", "--tis-clip", "4"],
         {"algorithm.importance": "token", "algorithm.importance_cap": "4"}),
        ("slime", [*SLIME_SIZES, "--calculate-per-token-loss"], {"loss.aggregation": None}),
    ],
)  # fmt: skip
def test_a_key_is_what_its_trainer_makes_of_it(trainer, words, keys):
    """None: nothing is written, because it is our default."""
    lines = dict(line.split("=", 1) for line in migrated(trainer, None, *words).lines)
    assert {key: lines.get(key) for key in keys} == keys


@pytest.mark.parametrize(
    ("trainer", "words", "key", "says"),
    [
        ("verl", [*GRPO, "actor_rollout_ref.rollout.top_p=0.9"], "actor_rollout_ref.rollout.top_p", "whole vocabulary"),
        ("verl", [*GRPO, "data.truncation=left"], "data.truncation", "never truncated"),
        ("verl", [*GRPO, "actor_rollout_ref.model.lora_rank=32"], "actor_rollout_ref.model.lora_rank", "LoRA"),
        ("verl", [*GRPO, f"{ACTOR}clip_ratio=0.3"], f"{ACTOR}clip_ratio", "clip_ratio_low"),
        ("trl", ["learning_rate=1e-5", "packing=true"], "packing", "multiply"),
        ("trl", ["learning_rate=1e-5", "loss_type=dft"], "loss_type", "cross-entropy"),
        ("trl", ["learning_rate=1e-5", "warmup_ratio=0.1"], "warmup_ratio", "optim.warmup_steps"),
        ("trl", [*TRL_SIZES, "top_k=50"], "top_k", "whole vocabulary"),
        ("slime", [*SLIME_SIZES, "--kl-coef", "0.1"], "--kl-coef", "slime itself"),
        ("slime", [*SLIME_SIZES, "--kl-loss-type", "k3", "--use-kl-loss", "--kl-loss-coef", "0.1"], "--kl-loss-type",
         "at most 10"),
    ],
)  # fmt: skip
def test_what_cannot_be_carried_over_says_what_happens_instead(trainer, words, key, says):
    account = migrated(trainer, None, *words).account
    told = dict([*account.changes, *account.give, *account.without])
    assert says in {shown.partition("=")[0]: why for shown, why in told.items()}[key]


def test_a_value_that_asks_for_nothing_is_the_same_by_default():
    told = migrated("verl", None, *GRPO, "actor_rollout_ref.model.lora_rank=0", "trainer.critic_warmup=0").account
    assert {"actor_rollout_ref.model.lora_rank=0", "trainer.critic_warmup=0"} <= set(told.same) and not told.without


def test_the_status_of_the_command_is_that_of_the_tool():
    done = subprocess.run(
        [sys.executable, "-m", "isoloss.tools.migrate", "verl", "absent.yaml"], text=True, capture_output=True
    )
    assert done.returncode == 2 and done.stderr.startswith("isoloss: error: absent.yaml")


def test_help_shows_what_the_tool_does(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert (
        ended.value.code == 0 and out.startswith("usage: python -m isoloss.tools.migrate ") and command.__doc__ in out
    )


def test_an_unknown_key_is_named_and_the_status_is_1(capsys):
    assert main(["verl", *GRPO, "algorithm.adv_estimater=rloo"]) == 1
    assert "Unknown:\n\n  algorithm.adv_estimater=rloo\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["verl", "absent.sh"], "absent.sh: cannot be read"),
        (["verl"], "not a configuration of verl"),
        (["trl", "rate=1"], "not a configuration of TRL"),
        (["slime", "--no-such-thing", "1"], "not a configuration of slime"),
        (["verl", *GRPO, f"{ACTOR}ppo_mini_batch_size=48"], "must divide data.train_batch_size=256"),
        (["verl", *GRPO, f"{ACTOR}optim.lr=fast"], "optim.lr='fast' must be a number"),
        (["verl", "algorithm.adv_estimator=grpo", "data.train_batch_size=256"], "rollout.num_generations=1"),
        (["trl", "num_generations=3"], "must divide the 8 completions"),
        (["trl", "num_generations=14", "processes=8"], "with processes=8; processes=7 would fit"),
        (["trl", "num_generations=6", "per_device_train_batch_size=2"], "processes=3 would fit"),
        (["verl", *GRPO, "algorithm.adv_estimator=remax"], "is not given the reward of a greedy completion"),
        (["verl", "algorithm.adv_estimator=grpo", "distillation.enabled=True"], "isoloss has no distillation"),
        (
            ["verl", "algorithm.adv_estimator=grpo", "actor_rollout_ref.model.lora_rank=8"],
            "(docs/lora.md); what is left is refused: rollout.num_generations=1",
        ),
        (["trl", *TRL_SIZES, "reward_funcs=[a.b,c.d]", "reward_weights=[1]"], "one for each of the 2 reward_funcs"),
        (["slime", "--lr", "1e-6"], "--rollout-batch-size"),
    ],
)
def test_a_mistake_is_one_line_with_status_2_and_nothing_is_written(argv, says, capsys, tmp_path):
    assert main([*argv, "--write", str(tmp_path / "preset.yaml")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("isoloss: error: ") and says in err
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_a_mapping_is_a_mistake(tmp_path, capsys):
    for name, text in (("list.yaml", "- 1"), ("broken.yaml", "a: [1"), ("broken.json", "{")):
        (tmp_path / name).write_text(text)
        assert main(["trl", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["verl_dapo.txt", "verl_sft.yaml", "slime_grpo.txt"])
def test_a_written_preset_is_the_same_configuration(name, tmp_path, capsys):
    preset, trainer = tmp_path / "mine.yaml", name.partition("_")[0]
    assert main([trainer, str(EXAMPLES / name), "--write", str(preset)]) == 0
    assert preset.read_text().startswith("# @package _global_\n") and str(preset) in capsys.readouterr().out
    result = migrated(trainer, EXAMPLES / name)
    kind = Config if result.recipe == "sft" else RLConfig
    values = defaults(kind)
    for key, value in flat(yaml.safe_load(preset.read_text())).items():
        group, _, field = key.rpartition(".")
        (values[group] if group else values)[field] = value
    assert build(kind, values) == compose_config(result.recipe, kind, ["preset=plain", *result.lines])[0]
    assert main([trainer, str(EXAMPLES / name), "--write", str(preset)]) == 2


def test_trl_takes_json_and_names_with_hyphens(tmp_path):
    (tmp_path / "grpo.json").write_text('{"num-generations": 4, "beta": 0.04, "loss_type": "bnpo"}')
    result = migrated("trl", tmp_path / "grpo.json", "--learning_rate", "2e-6")
    assert {"algorithm.kl_coef=0.04", "rollout.num_generations=4", "optim.lr=2e-06"} <= set(result.lines)


def test_a_file_of_verl_refers_to_other_keys_of_it(tmp_path):
    (tmp_path / "run.yaml").write_text(
        "data: {train_batch_size: 64, max_response_length: 100, max_prompt_length: '${data.max_response_length}'}\n"
        "actor_rollout_ref: {actor: {ppo_mini_batch_size: '${data.train_batch_size}'}, rollout: {n: 4}}\n"
        "algorithm: {adv_estimator: grpo}\n"
    )
    lines = migrated("verl", tmp_path / "run.yaml").lines
    assert "data.max_length=200" in lines and not any("minibatches" in line for line in lines)


def test_the_report_has_every_part(capsys):
    assert main(["trl", *TRL_SIZES, "loss_type=bnpo", "report_to=none", "epsilon=0.2"]) == 0
    out = capsys.readouterr().out
    for title in ("Keys for isoloss-grpo", "Give these before you run", "The loss, and the step", "Translated",
                  "Not named: TRL's defaults", "The same by default", "No counterpart"):  # fmt: skip
        assert f"{title}" in out
    assert "they differ: a mean of means" in out and "TRL: the sum over target tokens" in out


MODEL, CORRECTION = "actor_rollout_ref.model.", "algorithm.rollout_correction."
# What is migrated, and the keys of "What changes the result".
CHANGING = [
    ("verl", [*GRPO, f"{MODEL}lora_rank=32", f"{MODEL}lora_alpha=64"], {f"{MODEL}lora_rank", f"{MODEL}lora_alpha"}),
    ("verl", [*GRPO, f"{MODEL}lora.rank=8"], {f"{MODEL}lora.rank"}),
    ("verl", [*GRPO, f"{MODEL}lora_adapter_path=/a"], {f"{MODEL}lora_adapter_path"}),
    ("verl", [*GRPO, f"{MODEL}lora_alpha=64", f"{MODEL}lora_rank=0"], set()),
    ("verl", [*GRPO, f"{ACTOR}megatron.router_replay.mode=R3"], {f"{ACTOR}megatron.router_replay.mode"}),
    ("verl", [*GRPO, f"{ACTOR}router_replay.mode=R2"], {f"{ACTOR}router_replay.mode"}),
    ("verl", [*GRPO, f"{ACTOR}router_replay.mode=disabled"], set()),
    ("verl", [*GRPO, f"{MODEL}mtp.enable=True", f"{MODEL}mtp.enable_train=True"],
     {f"{MODEL}mtp.enable", f"{MODEL}mtp.enable_train"}),
    ("verl", [*GRPO, f"{MODEL}mtp.enable=True", f"{MODEL}mtp.enable_rollout=True"], set()),
    ("verl", [*GRPO, "data.image_key=images"], {"data.image_key"}),
    ("verl", [*GRPO, f"{CORRECTION}rollout_rs=token_k1", f"{CORRECTION}rollout_rs_threshold=2"],
     {f"{CORRECTION}rollout_rs", f"{CORRECTION}rollout_rs_threshold"}),
    ("verl", [*GRPO, f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=0.5_2"],
     {f"{CORRECTION}rollout_is_threshold"}),
    ("verl", [*GRPO, "distillation.enabled=True", "distillation.nnodes=1"],
     {"distillation.enabled", "distillation.nnodes"}),
    ("verl", [*GRPO, "distillation.enabled=False", "distillation.nnodes=1"], set()),
    ("verl", [*GRPO, "actor_rollout_ref.rollout.multi_turn.enable=True"],
     {"actor_rollout_ref.rollout.multi_turn.enable"}),
    ("verl", [*GRPO, f"{MODEL}path=/m/Qwen2.5-VL-7B-Instruct"], {f"{MODEL}path"}),
    ("verl", [*GRPO, f"{MODEL}path=/vl/Qwen2.5-7B"], set()),
    ("slime", [*SLIME_SIZES, "--hf-checkpoint", "/root/Qwen3-VL-8B/"], {"--hf-checkpoint"}),
    ("verl", ["data.train_batch_size=8", "model.lora_rank=8"], {"model.lora_rank"}),
    ("verl", ["data.train_batch_size=8", "model.mtp.enable=True", "model.mtp.enable_train=True"],
     {"model.mtp.enable", "model.mtp.enable_train"}),
    ("trl", ["learning_rate=1e-5", "use_peft=true", "lora_r=8"], {"use_peft", "lora_r"}),
    ("trl", ["learning_rate=1e-5", "lora_r=8"], set()),
    ("trl", [*TRL_SIZES, "use_vllm=true"], {"vllm_importance_sampling_mode"}),
    ("trl", [*TRL_SIZES, "use_vllm=true", "vllm_importance_sampling_mode=token_truncate"], set()),
    ("slime", [*SLIME_SIZES, "--use-opd", "--opd-kl-coef", "1"], {"--use-opd", "--opd-kl-coef"}),
    ("slime", [*SLIME_SIZES, "--enable-mtp-training", "--mtp-num-layers", "1"], {"--enable-mtp-training"}),
    ("slime", [*SLIME_SIZES, "--mtp-num-layers", "1"], set()),
    ("slime", [*SLIME_SIZES, "--use-rollout-routing-replay"], {"--use-rollout-routing-replay"}),
    ("slime", [*SLIME_SIZES, "--multimodal-keys", '{"image":"images"}'], {"--multimodal-keys"}),
    ("slime", [*SLIME_SIZES, "--custom-generate-function-path", "a.generate"], {"--custom-generate-function-path"}),
    ("slime", [*SLIME_SIZES, "--use-tis", "--tis-clip-low", "0.5"], {"--tis-clip-low"}),
    ("slime", [*SLIME_SIZES, "--use-tis", "--custom-tis-function-path", "a.f"], {"--custom-tis-function-path"}),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "words", "keys"), CHANGING)
def test_what_changes_the_result_comes_first_with_a_status_of_its_own(trainer, words, keys, capsys):
    result = migrated(trainer, None, *words)
    assert {change.partition("=")[0] for change in result.changes} == keys
    assert result.status == (3 if keys else 0)
    status = main([trainer, *words])
    assert status == result.status and capsys.readouterr().out.startswith("What changes the result:") == bool(keys)


def test_an_unknown_key_is_told_before_a_change():
    assert main(["verl", *GRPO, f"{MODEL}lora_rank=8", "algorithm.adv_estimater=rloo"]) == 1


@pytest.mark.parametrize(
    ("trainer", "words", "says"),
    [
        ("trl", ["learning_rate=1e-5", "save_strategy=epoch", "num_train_epochs=10", "processes=8"],
         "save_strategy=epoch: once an epoch, whose number of steps is in the data: checkpoint.every is rows / 64"),
        ("trl", ["learning_rate=1e-5", "save_steps=0.1"], "checkpoint.every is it x num_train_epochs=3 x rows / 8"),
        ("trl", ["learning_rate=1e-5", "eval_strategy=epoch"], "train.eval_every is rows / 8"),
        ("trl", ["learning_rate=1e-5", "save_strategy=best"], "no best checkpoint"),
        ("trl", ["learning_rate=1e-5", "warmup_ratio=0.1", "num_train_epochs=2"],
         "warmup_ratio=0.1: a share of steps whose number is in the data: optim.warmup_steps is it x "
         "num_train_epochs=2 x rows / 8"),
        ("trl", [*TRL_SIZES, "reward_funcs=[accuracy,format,tag_count]"],
         "accuracy, format, tag_count of your own code: reward.function=[file.py:function"),
        ("trl", [*TRL_SIZES, "reward_funcs=math"], "math of your own code"),
        ("trl", [*TRL_SIZES, "reward_funcs=[accuracy_reward,exact_match]"], "exact_match of your own code"),
        ("slime", [*SLIME_SIZES, "--input-key", "problem", "--eval-input-key", "q"],
         "--eval-input-key=q: data.columns holds for data.eval too"),
        ("verl", [*GRPO, f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"], "optim.warmup_steps is it x trainer.total_epochs"),
    ],
)  # fmt: skip
def test_what_only_the_data_or_the_user_knows_is_to_be_given(trainer, words, says):
    result = migrated(trainer, None, *words)
    assert any(says in line for line in result.before) and result.status == 0
    keys = {line.partition("=")[0] for line in result.lines}
    if "reward_funcs" in words[-1]:
        assert not keys & {"reward.function", "reward.weights"}


QUESTION, REPLY = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}
SLIME_SFT = ["--rollout-batch-size", "8", "--global-batch-size", "8", "--loss-type", "sft_loss"]
VERL_SFT = ["data.train_batch_size=8"]


@pytest.mark.parametrize(
    ("trainer", "words", "columns", "row", "read"),
    [
        ("slime", [*SLIME_SIZES, "--input-key", "prompt", "--label-key", "label"], "{prompt:prompt,answer:label}",
         {"prompt": [QUESTION], "label": "2", "answer": "of no use"}, {"prompt": [QUESTION], "answer": "2"}),
        ("slime", [*SLIME_SIZES, "--input-key", "q", "--tool-key", "t"], "{prompt:q,tools:t}",
         {"q": [QUESTION], "t": [{}], "prompt": "of no use"}, {"prompt": [QUESTION], "tools": [{}]}),
        ("slime", [*SLIME_SIZES, "--prompt-data", "a.jsonl"], "{prompt:input}",  # slime's default
         {"input": [QUESTION], "instruction": ""}, {"prompt": [QUESTION]}),
        ("slime", [*SLIME_SIZES, "--input-key", "prompt"], None, {"prompt": [QUESTION]}, {"prompt": [QUESTION]}),
        ("slime", SLIME_SIZES, None, {"prompt": [QUESTION]}, {"prompt": [QUESTION]}),
        ("slime", [*SLIME_SFT, "--input-key", "talk", "--label-key", "label"], "{messages:talk}",
         {"talk": [QUESTION, REPLY], "text": "of no use"}, {"messages": [QUESTION, REPLY]}),
        ("verl", [*GRPO, "data.prompt_key=question"], "{prompt:question}",
         {"question": [QUESTION], "reward_model": {"ground_truth": "2"}}, {"prompt": [QUESTION]}),
        ("verl", [*GRPO, "data.reward_fn_key=from"], "{prompt:prompt,data_source:from}",
         {"prompt": [QUESTION], "from": "gsm8k"}, {"prompt": [QUESTION], "data_source": "gsm8k"}),
        ("verl", [*GRPO, "data.prompt_key=prompt", "data.reward_fn_key=data_source"], None, {"prompt": [QUESTION]},
         {"prompt": [QUESTION]}),
        ("verl", [*VERL_SFT, "data.messages_key=talk", "data.tools_key=t"], "{messages:talk,tools:t}",
         {"talk": [QUESTION, REPLY], "t": [{}]}, {"messages": [QUESTION, REPLY], "tools": [{}]}),
        ("verl", [*VERL_SFT, "data.multiturn.enable=true", "data.multiturn.messages_key=talk"], "{messages:talk}",
         {"talk": [QUESTION, REPLY]}, {"messages": [QUESTION, REPLY]}),
        # As verl's examples/sft/gsm8k/run_gemma_2b.sh reads the rows of its gsm8k.py.
        ("verl", [*VERL_SFT, "data.prompt_key=extra_info", "data.response_key=extra_info",
                  "data.prompt_dict_keys=['question']", "+data.response_dict_keys=['answer']"],
         "{question:extra_info.question,answer:extra_info.answer}",
         {"prompt": [], "extra_info": {"question": "1 + 1?", "answer": "2"}}, {"messages": [QUESTION, REPLY]}),
        ("verl", [*VERL_SFT, "data.response_key=response"], "{question:question,answer:response}",
         {"question": "1 + 1?", "response": "2"}, {"messages": [QUESTION, REPLY]}),
        # open-r1, whose text is a turn of the user also where its column is called `prompt`.
        ("trl", [*TRL_SIZES, "dataset_prompt_column=problem"], "{question:problem}",
         {"problem": "1 + 1?", "solution": "2"}, {"prompt": [QUESTION]}),
        ("trl", [*TRL_SIZES, "dataset_prompt_column=prompt", "system_prompt=Think."], "{question:prompt}",
         {"prompt": "1 + 1?"}, {"prompt": [{"role": "system", "content": "Think."}, QUESTION]}),
        ("trl", ["learning_rate=1e-5", "dataset_text_field=content"], "{text:content}", {"content": "a", "text": "b"},
         {"text": "a"}),
        ("trl", ["learning_rate=1e-5", "dataset_text_field=text", "system_prompt=x"], None, {"text": "b"},
         {"text": "b"}),
    ],
)  # fmt: skip
def test_columns_are_named_and_a_row_is_read_as_its_trainer_reads_it(trainer, words, columns, row, read):
    result = migrated(trainer, None, *words)
    assert dict(line.split("=", 1) for line in result.lines).get("data.columns") == columns
    assert not result.account.unknown and not result.account.give
    kind = Config if result.recipe == "sft" else RLConfig
    config = compose_config(result.recipe, kind, ["preset=plain", "model.path=m", *result.lines])[0]
    values = recognised(row, "r:1", config.data, result.recipe != "sft").values
    assert {name: values[name] for name in read} == read


@pytest.mark.parametrize(
    ("trainer", "words", "keys"),
    [
        ("trl", ["learning_rate=1e-5", "save_strategy=epoch", "num_train_epochs=1"], {"checkpoint.every": None}),
        ("trl", ["learning_rate=1e-5", "save_strategy=no"], {"checkpoint.every": None}),
        ("trl", ["learning_rate=1e-5", "save_steps=0.1", "max_steps=95"], {"checkpoint.every": "10"}),
        ("trl", ["learning_rate=1e-5", "gradient_checkpointing=false"], {"memory.recompute": None}),
        ("trl", [*TRL_SIZES, "reward_funcs=[get_soft_overlong_punishment,accuracy_reward]", "reward_weights=[0.5,2]"],
         {"reward.function": "[math]", "reward.weights": "[2]", "algorithm.overlong_penalty": "0.5"}),
        ("verl", [*GRPO, f"{MODEL}enable_gradient_checkpointing=False"], {"memory.recompute": None}),
        ("verl", [*GRPO, f"{ACTOR}megatron.override_transformer_config.recompute_granularity=full",
                  f"{ACTOR}megatron.override_transformer_config.recompute_method=uniform",
                  f"{ACTOR}megatron.override_transformer_config.recompute_num_layers=1"],
         {"memory.recompute": "full", "memory.recompute_layers": None}),
        ("verl", [*GRPO, f"{ACTOR}megatron.tensor_model_parallel_size=2"], {"memory.recompute": None}),
        ("slime", [*SLIME_SIZES, "--recompute-granularity", "full", "--recompute-method", "block",
                   "--recompute-num-layers", "4"], {"memory.recompute": "full", "memory.recompute_layers": "4"}),
        ("slime", [*SLIME_SIZES, "--recompute-granularity", "selective"], {"memory.recompute": "selective"}),
    ],
)  # fmt: skip
def test_recomputation_saving_and_rewards_become_keys(trainer, words, keys):
    lines = dict(line.split("=", 1) for line in migrated(trainer, None, *words).lines)
    assert {key: lines.get(key) for key in keys} == keys


def test_a_temperature_that_verl_does_not_read_is_explained():
    account = migrated("verl", None, *GRPO, "actor_rollout_ref.rollout.val_kwargs.temperature=1.0").account
    told = {shown.partition("=")[0]: why for shown, why in account.without}
    assert "greedy without val_kwargs.do_sample=true" in told["actor_rollout_ref.rollout.val_kwargs.temperature"]
