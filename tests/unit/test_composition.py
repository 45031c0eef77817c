"""A configuration is what Hydra composes of the defaults, a preset, files and a command line."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from isoloss.engine.config.parse import defaults
from isoloss.parallel import UserError
from isoloss.recipes import launch

FILES = ("optim: {lr: 3e-4, warmup_steps: 7}\ndata.template_kwargs: {a: 1, b: 2}\n", "data.template_kwargs: {b: 3}\n")
# What people write on the left, and for Hydra on the right if that is written otherwise there.
KWARGS = "data.template_kwargs"
OVERRIDES = [
    ("optim.lr=1e-4",),
    ("optim.lr=2e-4",),
    ("optim.weight_decay=${optim.min_lr}",),
    ("train.seed=int(3.4)",),
    ("data.train=[a.jsonl,'b, c.jsonl']",),
    ("data.eval=['${asset:tiny}']",),
    ("output_dir='${oc.env:HOME}/${now:%Y} = x'",),
    ("model.path=\\${a}",),
    (f"{KWARGS}.z.y=4", f"++{KWARGS}.z.y=4"),
    (f"{KWARGS}={{q: [1, {{r: null}}]}}", f"++{KWARGS}={{q: [1, {{r: null}}]}}"),
    (f"{KWARGS}.q.1=5", f"++{KWARGS}.q.1=5"),
]


def by_hydra(recipe: str, preset: str, files: tuple[str, ...], overrides: list[str]) -> Any:
    parts = ["defaults", {"preset": preset}, *(f"file{n}" for n in range(len(files))), "_self_"]
    store = ConfigStore.instance()
    store.store(name="defaults", node=defaults(launch.RECIPES[recipe].config))
    for n, text in enumerate(files):
        store.store(name=f"file{n}", node=OmegaConf.create(text.replace(KWARGS + ":", "data:\n  template_kwargs:")))
    store.store(name="whole", node={"defaults": parts})
    with initialize_config_dir(str(launch.CONF / recipe), version_base="1.3"):
        return OmegaConf.to_container(compose("whole", overrides=overrides), resolve=True)


@pytest.mark.parametrize(("recipe", "preset"), [("sft", "tiny"), ("grpo", "plain"), ("dapo", "tiny")])
def test_hydra_composes_the_same(recipe, preset, tmp_path):
    words = [f"preset={preset}"]
    for n, text in enumerate(FILES):
        (tmp_path / f"{n}.yaml").write_text(text)
        words.append(f"config={tmp_path}/{n}.yaml")
    words += [override[0] for override in OVERRIDES]
    values, named, _ = launch.compose_values(recipe, launch.RECIPES[recipe].config, words)
    assert named == preset
    assert values == by_hydra(recipe, preset, FILES, [override[-1] for override in OVERRIDES])


def test_a_composition_leaves_nothing_for_the_next():
    kind = launch.RECIPES["sft"].config
    before = launch.compose_values("sft", kind, ["preset=plain"])[0]
    launch.compose_values("sft", kind, ["preset=plain", f"{KWARGS}.a=1", "data.train=[x]", "optim.lr=7"])
    assert launch.compose_values("sft", kind, ["preset=plain"])[0] == before == defaults(kind)


def test_what_hydra_takes_for_a_package_is_refused():
    with pytest.raises(UserError, match=r"cannot read 'data.template_kwargs.a@b=1': a name must not hold @"):
        launch.compose_values("sft", launch.RECIPES["sft"].config, [f"{KWARGS}.a@b=1"])
