"""Folders of adapters: what is written is read again, and what is not plain LoRA of this model is refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.families import published

from isoloss.models.architecture import Architecture
from isoloss.models.families import deepseek_v3, gpt_oss, qwen3, qwen3_5_moe_text, qwen3_moe
from isoloss.models.lora.config import LoraConfig
from isoloss.models.lora.factors import adapter_map
from isoloss.models.lora.initial import InitialFactors
from isoloss.models.lora.peft_folder import write_adapter
from isoloss.models.lora.peft_reader import AdapterFolder
from isoloss.models.lora.peft_source import FolderFactors, initial_factors, keys_of
from isoloss.parallel import UserError

DENSE = qwen3.architecture(published("qwen3"))
SPARSE = qwen3_moe.architecture(published("qwen3-moe"))
JOINED = gpt_oss.architecture(published("gpt-oss"))
LATENT = deepseek_v3.architecture(published("deepseek-v3"))
ROWS = qwen3_5_moe_text.architecture(published("qwen3.5-moe"))  # a tensor of all experts, as the hub has it
LORA = LoraConfig(rank=3, alpha=5.0)
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
HEAD = "base_model.model.lm_head.lora_{}.weight"
SOURCE = InitialFactors(3, random_b=True)
Tensors = dict[str, torch.Tensor]


def write(folder: Path, arch: Architecture = DENSE, lora: LoraConfig = LORA) -> Path:
    write_adapter(folder, arch, lora, SOURCE, None)
    return folder


def change(folder: Path, tensors: Callable[[Tensors], Any] = lambda _: None, **fields: Any) -> Path:
    """Change the tensors and the configuration of an adapter's folder."""
    path, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    found = load_file(path)
    tensors(found)
    save_file(found, path, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


@pytest.mark.parametrize(
    ("arch", "lora", "read_as"),
    [
        (DENSE, LORA, LORA),
        (DENSE, replace(LORA, targets=("attention",)), replace(LORA, targets=("q_proj", "k_proj", "v_proj", "o_proj"))),
        # The scale is written as alpha / r.
        (DENSE, LoraConfig(rank=4, alpha=8.0, scaling="sqrt-rank"), LoraConfig(rank=4, alpha=16.0)),
        (SPARSE, replace(LORA, expert_rank=2), replace(LORA, expert_rank=2)),
        # Two ranks with one alpha are rsLoRA's.
        *[(SPARSE, lora, lora) for lora in (LoraConfig(rank=4, alpha=8.0, scaling="sqrt-rank", expert_rank=2),)],
        (JOINED, LORA, LORA),
        (ROWS, LORA, LORA),
        (JOINED, replace(LORA, targets=("gate_up_proj",)), replace(LORA, targets=("gate_up_proj",))),
        (JOINED, replace(LORA, targets=("o_proj", "down_proj")), replace(LORA, targets=("o_proj", "down_proj"))),
        (LATENT, replace(LORA, targets=("experts",)), replace(LORA, targets=("experts",))),
    ],
)
def test_what_is_written_is_read(arch, lora, read_as, tmp_path):
    """Every factor, bit for bit, and the keys under which it can be trained on."""
    adapter = AdapterFolder(write(tmp_path / "a", arch, lora), arch)
    assert keys_of(adapter, arch) == read_as
    source = FolderFactors(adapter)
    for factors in adapter_map(arch, lora):
        assert torch.equal(source.whole(factors.a), SOURCE.whole(factors.a)), factors.a.name
        assert torch.equal(source.whole(factors.b), SOURCE.whole(factors.b)), factors.b.name
    assert sorted({pair.scale for pair in adapter.pairs.values()}) == pytest.approx(
        sorted({lora.scale(factors.rank) for factors in adapter_map(arch, lora)})
    )
    initial_factors(str(tmp_path / "a"), arch, lora)


def test_names_of_pefts_wrapper(tmp_path):
    """One matrix alone has no inner wrapper, and gate_up_proj is the inner one of two."""
    names = {}
    for target in ("gate_up_proj", "down_proj", "experts"):
        folder = write(tmp_path / target, JOINED, replace(LORA, targets=(target,)))
        tensors = load_file(folder / "adapter_model.safetensors")
        names[target] = {name.split("experts.")[1] for name in tensors if ".experts." in name}
    outer = {"lora_A.weight", "lora_B.weight"}
    assert names["gate_up_proj"] == names["down_proj"] == outer
    assert names["experts"] == outer | {f"base_layer.{name}" for name in outer}


def test_joined_experts_have_the_rank_of_others(tmp_path):
    """Where the files hold gate and up as one matrix, it has one adapter of lora.rank."""
    folder = write(tmp_path / "a", ROWS)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["rank_pattern"] == config["alpha_pattern"] == {}
    assert "mlp.experts.gate_up_proj" in config["target_parameters"]


def test_joined_experts_of_a_model_that_has_them_apart(tmp_path):
    """PEFT has one A for gate and up: both start from it, each with its rows of B."""
    experts, rank = 6, 3
    adapter = write(tmp_path / "a", SPARSE, replace(LORA, targets=("o_proj",)))
    a = torch.rand(experts * rank, 48)
    b = torch.rand(56, rank * experts)

    def add(tensors: Tensors) -> None:
        for layer in (0, 1):
            where = f"base_model.model.model.layers.{layer}.mlp.experts.lora_"
            tensors |= {f"{where}A.weight": a.clone(), f"{where}B.weight": b.clone()}

    change(adapter, add, target_parameters=["mlp.experts.gate_up_proj"])
    found = AdapterFolder(adapter, SPARSE)
    for expert in range(experts):
        of_a, of_b = a.view(experts, rank, 48)[expert], b.view(56, rank, experts)[:, :, expert]
        for name, rows in (("gate_proj", slice(28)), ("up_proj", slice(28, 56))):
            pair = found.pairs[f"model.layers.1.mlp.experts.{expert}.{name}.weight", None]
            assert torch.equal(pair.a, of_a) and torch.equal(pair.b, of_b[rows])
    assert keys_of(found, SPARSE).targets == ("o_proj", "gate_proj", "up_proj")


def test_types_of_factors(tmp_path):
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        folder = write(tmp_path / str(dtype))
        change(folder, lambda tensors: tensors.update({name: t.to(dtype) for name, t in tensors.items()}))  # noqa: B023
        assert {pair.a.dtype for pair in AdapterFolder(folder, DENSE).pairs.values()} == {dtype}


def drop(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


def put(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name: torch.ones(shape, dtype=dtype)})


def renamed(old: str, new: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({name.replace(old, new): tensors.pop(name) for name in list(tensors)})


NOTHING = drop()
REFUSED = [
    (NOTHING, {"peft_type": "LOHA"}, r"peft_type='LOHA' is not LORA"),
    (NOTHING, {"use_dora": True}, r"use_dora=True means DoRA"),
    (NOTHING, {"bias": "lora_only"}, r"bias='lora_only': the model's biases were trained beside"),
    (NOTHING, {"lora_bias": True}, r"lora_bias=True means biases of the factors B"),
    (NOTHING, {"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] means copies of whole modules"),
    (NOTHING, {"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\] means rows of the embedding"),
    (NOTHING, {"fan_in_fan_out": True}, r"fan_in_fan_out=True means matrices stored as \[in, out\]"),
    (NOTHING, {"init_lora_weights": "pissa"}, r"init_lora_weights='pissa' changes the model that the adapter is for"),
    (NOTHING, {"use_newest_thing": 1}, r"use_newest_thing=1 means something that isoloss does not know"),
    (NOTHING, {"r": "eight"}, r"'eight' where a whole number above 0 should stand"),
    (NOTHING, {"lora_alpha": -1}, r"-1 where a number above 0"),
    (NOTHING, {"rank_pattern": {"(": 3}}, r"no configuration of PEFT's LoRA"),
    (NOTHING, {"r": 4}, r"have shapes \[3, \d+\] and \[\d+, 3\] where the model and .* \[4, \d+\] and \[\d+, 4\]"),
    (NOTHING, {"rank_pattern": {"q_proj": 2}}, r"layers.0.self_attn.q_proj have shapes .* call for \[2, 48\]"),
    (drop(Q.format("B")), {}, r"lacks base_model.*q_proj.lora_B.weight"),
    (drop(Q.format("A"), Q.format("B")), {}, r"lacks the factors of model.layers.0.self_attn.q_proj, which target_mod"),
    (put(Q.format("A"), 3, 47), {}, r"q_proj have shapes \[3, 47\] and \[80, 3\] where .* call for \[3, 48\]"),
    (put(Q.format("A"), 3, 48, 1), {}, r"has 3 dimensions where a factor has 2"),
    (put(Q.format("A"), 3, 48, dtype=torch.int8), {}, r"q_proj.lora_A.weight has the type I8; only F32, BF16"),
    (put(HEAD.format("A"), 3, 48), {}, r"lacks base_model.model.lm_head.lora_B"),
    (
        lambda t: (put(HEAD.format("A"), 3, 48)(t), put(HEAD.format("B"), 308, 3)(t)),
        {}, r"lm_head have shapes \[3, 48\] and \[308, 3\] where .* call for \[3, 48\] and \[307, 3\]",
    ),
    (put("base_model.model.model.embed_tokens.lora_embedding_A", 3, 307), {}, r"of an embedding"),
    (put("base_model.model.model.norm.weight", 48), {}, r"norm.weight, which is a copy of the model's own"),
    (put(Q.format("B").replace("weight", "bias"), 80), {}, r"lora_B.bias, which is a bias"),
    (
        put("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", 80),
        {}, r"lora_magnitude_vector, which is of DoRA",
    ),
    (
        renamed("layers.1.", "layers.7."),
        {"target_modules": "all-linear"}, r"adapts model.layers.7.*, which the model does not have as a matrix",
    ),
    (
        renamed("model.model.l", "model.model.language_model.l"),
        {}, r"adapts model.language_model.layers.0.*, which the model does not have",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tensors", "fields", "says"), REFUSED, ids=[says[:40] for *_, says in REFUSED])
def test_refused(tensors, fields, says, tmp_path):
    with pytest.raises(UserError, match=says):
        AdapterFolder(change(write(tmp_path / "a"), tensors, **fields), DENSE)


def test_damaged_files(tmp_path):
    folder = write(tmp_path / "a")
    path = folder / "adapter_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"is not a safetensors file, or cut short"):
        AdapterFolder(folder, DENSE)
    path.unlink()
    with pytest.raises(UserError, match=r"adapter_model.safetensors is missing; export"):
        AdapterFolder(folder, DENSE)
    (folder / "adapter_model.bin").touch()
    with pytest.raises(UserError, match=r"convert adapter_model.bin to safetensors"):
        AdapterFolder(folder, DENSE)
    path.write_bytes(whole)
    change(folder, lambda tensors: tensors[Q.format("A")].fill_(float("nan")))
    with pytest.raises(UserError, match=r"lora_A of model.layers.0.self_attn.q_proj in .* holds numbers that are inf"):
        FolderFactors(AdapterFolder(folder, DENSE)).whole(adapter_map(DENSE, LORA)[0].a)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(UserError, match=r"adapter_config.json is not valid JSON"):
        AdapterFolder(folder, DENSE)
    with pytest.raises(UserError, match=r"nowhere is not a folder"):
        AdapterFolder(tmp_path / "nowhere", DENSE)


def test_some_experts_are_refused(tmp_path):
    folder = write(tmp_path / "a", SPARSE)
    change(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts.3.down_proj" in name])
    with pytest.raises(UserError, match=r"adapts some experts of layer 0 and not all of them"):
        AdapterFolder(folder, SPARSE)


@pytest.mark.parametrize(
    ("arch", "written", "keys", "says"),
    [
        (DENSE, LORA, LoraConfig(rank=8, alpha=5.0), r"lora.rank=8, and .* lora.init=.* rank 3: set lora.rank=3"),
        (DENSE, LORA, LoraConfig(rank=3), r"alpha=32.0 .* 10.6667, .* 1.66667: set lora.alpha=5 and lora.scaling=rank"),
        (DENSE, LORA, replace(LORA, scaling="sqrt-rank"), r"lora.scaling=sqrt-rank multiplies by 2.88"),
        (DENSE, LORA, replace(LORA, targets=("attention",)), r"targets=\[attention\], .*: set lora.targets=\[all\]"),
        (DENSE, replace(LORA, targets=("o_proj",)), LORA, r"lora.targets=\[all\], and .*: set lora.targets=\[o_proj\]"),
        (SPARSE, replace(LORA, expert_rank=2), LORA, r"expert_rank=null, .* 2 for experts: set lora.expert_rank=2"),
    ],
)  # fmt: skip
def test_keys_that_mean_another_adapter(arch, written, keys, says, tmp_path):
    """Also those at their default: none is overridden without a word."""
    with pytest.raises(UserError, match=says):
        initial_factors(str(write(tmp_path / "a", arch, written)), arch, keys)


def only(arch: Architecture, keep: Callable[[str], bool]) -> Callable[[Path], AdapterFolder]:
    def of(folder: Path) -> AdapterFolder:
        write(folder, arch)
        change(folder, lambda t: [t.pop(name) for name in list(t) if not keep(name)], target_modules="all-linear")
        return AdapterFolder(folder, arch)

    return of


@pytest.mark.parametrize(
    ("adapter", "says"),
    [
        (only(DENSE, lambda name: "q_proj" in name), r"a part of q_proj, k_proj, v_proj, .* not k_proj, v_proj"),
        (only(DENSE, lambda name: "0.self_attn.o_proj" in name), r"adapts some layers and not others, which"),
    ],
)  # fmt: skip
def test_adapters_that_can_only_be_merged(adapter, says, tmp_path):
    with pytest.raises(UserError, match=says + ".*isoloss-convert merge"):
        keys_of(adapter(tmp_path / "a"), DENSE)


def test_ranks_and_scales_that_keys_cannot_say(tmp_path):
    folder = write(tmp_path / "a")
    change(folder, alpha_pattern={"o_proj": 7})
    with pytest.raises(UserError, match=r"products of scales 1.66667, 2.33333, which one lora.alpha cannot say"):
        keys_of(AdapterFolder(folder, DENSE), DENSE)
    change(
        folder,
        lambda t: t.update({k: v[:2] if "A.w" in k else v[:, :2].clone() for k, v in t.items() if "o_proj" in k}),
    )
    change(folder, alpha_pattern={}, rank_pattern={"o_proj": 2})
    with pytest.raises(UserError, match=r"has adapters of ranks 2, 3, and lora.rank is one for all"):
        keys_of(AdapterFolder(folder, DENSE), DENSE)


def test_names_of_a_multimodal_model(tmp_path):
    """Both those of the whole model and those of its text model alone are read."""
    whole = replace(DENSE, tensor_prefix="model.language_model.", head_prefix="")
    folder = write(tmp_path / "a", whole)
    assert all(".language_model." not in name for name in load_file(folder / "adapter_model.safetensors"))
    wanted = adapter_map(whole, LORA)[0].a
    assert torch.equal(FolderFactors(AdapterFolder(folder, whole)).whole(wanted), SOURCE.whole(wanted))
    change(
        folder,
        lambda t: t.update({k.replace("model.layers", "model.language_model.layers"): t.pop(k) for k in list(t)}),
    )
    assert torch.equal(FolderFactors(AdapterFolder(folder, whole)).whole(wanted), SOURCE.whole(wanted))


def test_nothing_half_is_written(tmp_path, monkeypatch):
    class Broken:
        def whole(self, weight: Any) -> torch.Tensor:
            if "layers.1." in weight.name:
                raise UserError("damaged")
            return SOURCE.whole(weight)

    with pytest.raises(UserError, match="damaged"):
        write_adapter(tmp_path / "a", DENSE, LORA, Broken(), None)
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    monkeypatch.undo()
    write(tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    with pytest.raises(UserError, match=r"exists already; choose another folder"):
        write(tmp_path / "a")


@pytest.mark.parametrize(
    ("keys", "says"),
    [({"init": "a"}, r"lora.init='?a'? is an adapter to start from: set lora.rank"),
     ({"init": "a", "rank": 3, "seed": 1}, r"lora.seed=1 is for random factors: leave it out with lora.init")],
)  # fmt: skip
def test_keys_that_contradict(keys, says):
    with pytest.raises(UserError, match=says):
        LoraConfig(**keys)
