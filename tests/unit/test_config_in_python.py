"""Configurations that a program makes: values of other types, groups that are none, and files."""

from pathlib import Path

import pytest

from isoloss.engine import (
    BatchConfig,
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RewardConfig,
    RLConfig,
    RLDataConfig,
    TrainConfig,
    UserError,
)


def test_lists_single_texts_and_paths_are_taken():
    assert DataConfig(train="a.jsonl").train == ("a.jsonl",) == DataConfig(train=["a.jsonl"]).train
    assert DataConfig(train=[Path("a"), "b"], eval=Path("c")) == DataConfig(("a", "b"), ("c",))
    assert RewardConfig("math").function == ("math",) and OptimConfig(betas=[0.5, 0.9]).betas == (0.5, 0.9)
    config = Config(ModelConfig(Path("DIR")), output_dir=Path("out"))
    assert (config.model.path, config.output_dir) == ("DIR", "out") and OptimConfig(lr=1).lr == 1
    assert hash(config) == hash(Config(ModelConfig("DIR"), output_dir="out"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Config("DIR"), "model is of type str: give model=ModelConfig(...)"),
        (lambda: Config({"path": "DIR"}), "model is of type dict: give model=ModelConfig(...)"),
        (lambda: RLConfig(ModelConfig("DIR"), DataConfig()), "data is of type DataConfig: give data=RLDataConfig(...)"),
        (lambda: Config(ModelConfig("DIR"), output_dir=3), "output_dir=3 must be text"),
        (lambda: OptimConfig(lr="1e-3"), "optim.lr='1e-3' must be a number"),
        (lambda: OptimConfig(lr=None), "optim.lr=None must be a number"),
        (lambda: OptimConfig(lr=True), "optim.lr=True must be a number"),
        (lambda: TrainConfig(steps=1.5), "train.steps=1.5 must be an integer"),
        (lambda: TrainConfig(deterministic=1), "train.deterministic=1 must be true or false"),
        (lambda: BatchConfig(global_size="8"), "batch.global_size='8' must be an integer"),
        (lambda: ParallelConfig(tp=True), "parallel.tp=True must be an integer"),
        (lambda: ParallelConfig(overlap_grad_reduce="no"), "parallel.overlap_grad_reduce='no' must be true or false"),
        (lambda: DataConfig(train={"a": 1}), "data.train={'a': 1} must be a list"),
        (lambda: ModelConfig(3), "model.path=3 must be text"),
        (lambda: OptimConfig(betas=[0.5, 1.0]), "optim.betas=(0.5, 1.0) must each be in [0, 1)"),
    ],
)
def test_another_type_is_refused_by_the_name_of_its_key(make, message):
    with pytest.raises(UserError) as refused:
        make()
    assert str(refused.value) == message


def test_a_file_holds_a_configuration(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("model: {path: DIR}\ndata: {train: [a.jsonl], duplicates: drop}\noptim: {lr: 1e-4}\n")
    data = RLDataConfig(["a.jsonl"], duplicates="drop")
    assert RLConfig.from_file(file) == RLConfig(ModelConfig("DIR"), data, optim=OptimConfig(lr=1e-4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {path: DIR}\noptim: {rl: 1}", ":2: unknown key 'optim.rl'; did you mean 'optim.lr'?"),
        ("model: {path: DIR}\ntrain: {steps: many}", ":2: train.steps='many' must be an integer"),
        ("preset: tiny\nmodel: {path: DIR}", ": preset=tiny is read by"),
        ("data: {train: [a]}", ": model.path='' must name a Hugging Face folder or a checkpoint"),
        ("- a", " must hold keys, a line each"),
        ("a: [", ":1: cannot be read as YAML"),
    ],
)
def test_a_mistake_in_a_file_is_named_with_the_file(text, message, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(UserError) as refused:
        Config.from_file(tmp_path / "own.yaml")
    assert f"{tmp_path}/own.yaml{message}" in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.yaml: No such file"):
        Config.from_file(tmp_path / "nowhere.yaml")
