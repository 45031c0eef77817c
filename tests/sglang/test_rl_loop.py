"""A recipe of the tinker-cookbook whose completions come from a real SGLang server."""

import json
import shutil

import pytest
from support.runs.runs import write_rows
from support.serve import cookbook, offline
from support.serve.server import PYTHON, environment, served
from support.servers.server_commands import SGLANG

from isoloss.recipes import launch

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,  # two minutes
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="make environments makes the SDK's environment"),
]
# The SDK's adapters have every matrix and the output matrix, of rank 32 by the recipe's default.
OPTIONS = (
    "--enable-lora --lora-backend torch_native --max-lora-rank 32 --max-loras-per-batch 4 "
    "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head"
)


SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
    "We have r's at positions 3, 8, and 9. \\boxed{3}"
)


def few_shot_rows() -> list[dict[str, object]]:
    """Return sums as rl_loop asks them, behind its example; seven of ten answers are ten too high."""
    before, rows = offline.turns(f"How many r's are in strawberry?{SUFFIX}", EXAMPLE), []
    for row in offline.boxed_rows((1,), count=1600, mistakes=0.7):
        asked, answer = row["messages"]
        asked = {**asked, "content": asked["content"].removesuffix(offline.SUFFIX) + SUFFIX}
        rows.append({"messages": [*before, asked, answer]})
    return rows


def test_rl_loop_learns_from_what_sglang_samples(start, tmp_path):
    base = shutil.copytree(offline.ASSETS / "chat", tmp_path / "base")
    arch = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**arch, "tie_word_embeddings": False}))  # lm_head has an adapter
    data = write_rows(tmp_path / "sft.jsonl", few_shot_rows())
    words = ["preset=chat", f"model.path={base}", f"data.train={data}", "data.max_length=512", "batch.global_size=8"]
    assert launch.main("sft", [*words, "train.steps=200", "optim.lr=1e-2", f"output_dir={tmp_path}/sft"]) == 0
    model = tmp_path / "sft/hf"
    offline.make(tmp_path, model, second=(1,))
    url = start(f"{SGLANG.replace('{model}', str(model))} {OPTIONS}")
    log_path = tmp_path / "log"
    words = [*cookbook.SMALL["rl_loop"], "max_steps=8", f"log_path={log_path}"]
    where = (f"model.path={model}", "model.from_scratch=false", f"serve.sglang_servers=[{url}]")
    with served(tmp_path / "serve", *where) as server:
        cookbook.run_recipe("rl_loop", words, tmp_path, environment(server.url, server.key))
    rewards = cookbook.series(log_path, "reward/total")
    assert len(rewards) == 8 and sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.1, rewards
