"""The outcomes of verl's and slime's example scripts, and the tool that compares them with a checkout."""

import json
from collections import Counter
from pathlib import Path

import pytest

from isoloss.tools.dev import migrate_examples
from isoloss.tools.dev.migrate_examples import main

OUTCOMES = json.loads((Path(__file__).parents[1] / "oracles" / "migrate" / "examples.json").read_text())
VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=256 \\
    actor_rollout_ref.rollout.n=4 data.train_files=$HOME/a.parquet
"""
SLIME = "python3 train.py --rollout-batch-size 8 --n-samples-per-prompt 4 --rollout-max-response-len 100\n"


def test_all_example_scripts_have_an_outcome():
    assert {name: len(told) for name, told in OUTCOMES.items()} == {"verl": 109, "slime": 38}
    statuses = Counter(outcome["status"] for told in OUTCOMES.values() for outcome in told.values())
    assert set(statuses) == {0, 1, 2, 3} and statuses[3] >= 40
    for told in OUTCOMES.values():
        for script, outcome in told.items():
            assert bool(outcome.get("changes")) == (outcome["status"] == 3) or outcome["status"] == 1, script
            assert "num_generations" not in outcome.get("refused", "") or "rollout_correction" in script


@pytest.mark.parametrize(
    ("part", "of"),
    [("lora/", "lora"), ("router_replay/", "replay"), ("mtp_trainer/run_mimo_7b_mtp_m", "mtp"), ("_vl_8b", "image")],
)
def test_scripts_of_what_isoloss_lacks_are_never_the_same(part, of):
    found = [outcome for script, outcome in OUTCOMES["verl"].items() if part in script and outcome["status"] != 2]
    assert found and all(any(of in key for key in outcome["changes"]) for outcome in found)


def test_an_outcome_that_is_another_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(migrate_examples, "GOLDEN", tmp_path / "examples.json")
    scripts = {"verl": tmp_path / "verl" / "examples" / "a" / "run.sh", "slime": tmp_path / "slime/scripts/run-a.sh"}
    for path, text in zip(scripts.values(), (VERL, SLIME)):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    argv = ["--verl", str(tmp_path / "verl"), "--slime", str(tmp_path / "slime")]
    assert main([*argv, "--write"]) == 0
    assert "verl: 1 scripts; the same 1" in capsys.readouterr().out and main(argv) == 0
    scripts["verl"].write_text(VERL.replace("rollout.n=4", "rollout.n=4 actor_rollout_ref.model.lora_rank=8"))
    scripts["slime"].unlink()
    assert main(argv) == 2 and "has no examples" in capsys.readouterr().err
    scripts["slime"].write_text(SLIME)
    assert main(argv) == 1
    out = capsys.readouterr().out
    assert "verl/examples/a/run.sh: was" in out and "lora_rank" in out and "slime/scripts" not in out
