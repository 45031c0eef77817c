"""Names of other trainers: what a run says of them."""

import inspect
import re
import tomllib
from pathlib import Path

import pytest
from transformers import TrainingArguments

from isoloss.engine.config import elsewhere
from isoloss.engine.config.elsewhere import FOLDER, KEYS_BY_NAME, WITHOUT_A_KEY, explanation, key_of
from isoloss.engine.config.parse import known_keys, unknown_key
from isoloss.engine.config.schema import Config
from isoloss.engine.rl.config import RLConfig

KEYS = known_keys(RLConfig)
ORACLES = Path(__file__).parents[1] / "oracles" / "migrate"


def test_every_name_leads_to_a_key_that_exists():
    assert set(KEYS_BY_NAME.values()) <= set(KEYS)


def test_no_key_of_ours_is_taken_for_one_of_another_trainer():
    """Its name in a wrong group leads to it, not elsewhere."""
    own = {key.rsplit(".", 1)[-1] for key in KEYS}
    assert not own & KEYS_BY_NAME.keys()
    assert not {word for key in KEYS for word in (key, *re.split(r"[._]", key))} & WITHOUT_A_KEY.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("checkpoint.save_steps", "did you mean 'checkpoint.every'?"),
        ("train.logger", "unknown key 'train.logger': every run writes metrics.jsonl"),
        ("lora.rnak", "did you mean 'lora.rank'?"),
        ("batch.per_device", "batch.max_tokens bounds the tokens of a micro-batch"),
        ("per_device_train_batch_size", "a step has batch.global_size sequences on any number of devices"),
        ("actor_rollout_ref.actor.optim.lr", "did you mean 'optim.lr'?"),
        ("critic.optim.lr", "did you mean 'algorithm.critic_lr'?"),
        ("--rollout-batch-size", "did you mean 'batch.global_size'?"),
        ("train_batch_size", "did you mean 'batch.global_size'?"),
        ("save_steps", "did you mean 'checkpoint.every'?"),
        ("clip_ratio_low", "did you mean 'algorithm.clip_low'?"),
        ("hub_model_id", "a Hugging Face folder in output_dir/hf, which you upload"),
        ("dataloader_num_workers", "isoloss's loader, with the files of data.train"),
        ("trainer.nnodes", "torchrun decides how many processes run"),
        ("--sglang-mem-fraction-static", "you start SGLang servers and name them"),
        ("actor_rollout_ref.rollout.max_steps", "isoloss starts no servers of vLLM"),  # not the trainer's own steps
        ("train.lr", "did you mean 'optim.lr'?"),
        ("optim.lrr", "did you mean 'optim.lr'?"),
        ("optim.cliip", "did you mean 'optim.clip'?"),  # a group of verl's too, in which any name is explained
        ("checkpoint.evry", "did you mean 'checkpoint.every'?"),
        ("actor_rollout_ref.model.lora_rank", "set lora.rank, lora.alpha and lora.targets (docs/lora.md)"),
        ("actor_rollout_ref.rollout.n", "did you mean 'rollout.num_generations'?"),
        ("use_peft", "lora.rank above 0 trains an adapter"),
        ("lora_r", "did you mean 'lora.rank'?"),
        ("save_total_limit", "did you mean 'checkpoint.keep'?"),
        ("data.max_response_length", "did you mean 'rollout.max_new_tokens'?"),
        ("train.report_to", "there are no other loggers"),
    ],
)
def test_what_is_said(name, says):
    assert says in unknown_key(name, KEYS)


def test_every_name_of_the_tables_is_answered():
    """Each key of another trainer that `migrate` translates leads to a key of isoloss, in the trainer's spelling. Each
    name that stands in a table without a counterpart leads to the reason."""
    tables = [tomllib.loads(path.read_text()) for path in FOLDER.glob("*.toml")]
    assert len(tables) == 6
    rows = {name: row["to"] for table in tables for name, row in table["keys"].items() if "to" in row}
    assert len(rows) > 200
    for name, to in rows.items():
        said = unknown_key(name, KEYS)
        assert "did you mean" in said or explanation(name), name
        if name.count(".") > 1:  # no flat name, which a shorter list may lead elsewhere
            assert f"did you mean '{to.split()[0].partition('|')[0]}'?" in said or explanation(name), name
    for table in tables:
        for section in ("changes", "give", "without"):
            for reason, names in table.get(section, {}).items():
                listed = names if isinstance(names, list) else names["keys"]
                plain = [name.lstrip("-").replace("-", "_") for name in listed if not name.endswith("*")]
                assert all(explanation(name) or key_of(name) for name in plain), reason


def test_no_name_stands_in_a_table_and_in_the_list():
    names, by_last_part = elsewhere._keys_of_tables()
    assert not [name for name, key in KEYS_BY_NAME.items() if (names.get(name) or by_last_part.get(name)) == key]


def test_a_key_of_reinforcement_learning_is_not_advised_in_fine_tuning():
    said = unknown_key("max_completion_length", known_keys(Config))
    assert "rollout." not in said


def test_names_of_trl_and_verl_are_known():
    """Of the arguments that transformers' Trainer has today, and the keys of verl that its example scripts set."""
    arguments = inspect.signature(TrainingArguments).parameters
    wanted = ["learning_rate", "max_grad_norm", "num_train_epochs", "max_steps", "save_steps", "save_total_limit"]
    wanted += ["eval_steps", "gradient_checkpointing"]
    assert set(wanted) <= arguments.keys() and all(map(key_of, wanted))
    assert [name for name in arguments if not key_of(name) and not explanation(name)] == []
    verl = (ORACLES / "names_verl_rl.txt").read_text()
    asked = [
        "train_batch_size",
        "max_response_length",
        "ppo_mini_batch_size",
        "loss_agg_mode",
        "save_freq",
        "test_freq",
    ]
    assert all(re.search(rf"\b{name}\b", verl) and key_of(name) for name in asked)
    slime = (ORACLES / "names_slime.txt").read_text().replace("-", "_")
    assert "rollout_batch_size" in slime and key_of("rollout_batch_size") == "batch.global_size"
    assert explanation("optim.lr", {"optim"}) is None
