"""Names of other trainers: what a run says of them."""

import inspect
import re
from pathlib import Path

import pytest
from transformers import TrainingArguments

from isoloss.engine.config.elsewhere import KEYS_BY_NAME, WITHOUT_A_KEY, explanation, key_of
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
        ("lora.rank", "there are no adapters yet: all weights are trained"),
        ("batch.per_device", "did you mean 'batch.max_tokens'?"),
        ("actor_rollout_ref.model.lora_rank", "there are no adapters yet"),
        ("actor_rollout_ref.rollout.n", "did you mean 'rollout.num_generations'?"),
        ("use_peft", "there are no adapters yet"),
        ("save_total_limit", "did you mean 'checkpoint.keep'?"),
        ("data.max_response_length", "did you mean 'rollout.max_new_tokens'?"),
        ("train.report_to", "there are no other loggers"),
    ],
)
def test_what_is_said(name, says):
    assert says in unknown_key(name, KEYS)


def test_a_key_of_reinforcement_learning_is_not_advised_in_fine_tuning():
    said = unknown_key("max_completion_length", known_keys(Config))
    assert "rollout." not in said


def test_names_of_trl_and_verl_are_known():
    """Of the arguments that transformers' Trainer has today, and the keys of verl that its example scripts set."""
    arguments = inspect.signature(TrainingArguments).parameters
    wanted = ["learning_rate", "max_grad_norm", "num_train_epochs", "max_steps", "save_steps", "save_total_limit"]
    wanted += ["eval_steps", "per_device_train_batch_size", "gradient_checkpointing", "resume_from_checkpoint"]
    assert set(wanted) <= arguments.keys() and all(map(key_of, wanted))
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
    assert explanation("optim.lr") is None
