"""Text models inside of multimodal ones as the hub has them, with a vision tower beside them, and for Qwen3.5 a layer
for multi-token prediction."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

from support.models.families import VOCAB, config, fill
from support.models.transformers_parity import TOKEN_MEAN, make_engine, make_samples

# Families that are the text model of another one inside: tests/checkpoints/test_multimodal.py compares their logits.
WRAPPERS = {Mistral3Config.model_type}
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 20, "patch_size": 2, "spatial_merge_size": 1,
    "temporal_patch_size": 1, "out_hidden_size": 48, "num_position_embeddings": 16,
}  # fmt: skip


PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1,
    "num_attention_heads": 2, "head_dim": 8, "image_size": 8, "patch_size": 2,
}  # fmt: skip


def write_mistral3(folder: Path, text: str, *, tied: bool = False, common: bool = False) -> Path:
    """text: a row of `families`. common: by the names that most multimodal models have."""
    inner = config(text, tie_word_embeddings=tied).to_dict()
    whole = Mistral3Config(text_config=inner, vision_config=PIXTRAL, image_token_index=1, tie_word_embeddings=tied)
    torch.manual_seed(1)
    fill(Mistral3ForConditionalGeneration(whole)).save_pretrained(folder)
    if common:
        file = folder / "model.safetensors"
        save_file({_common(n): t for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    return folder


def _common(name: str) -> str:
    text = name.removeprefix("language_model.")
    if text == name:
        return f"model.{name}"
    return text if text == "lm_head.weight" else f"model.language_model.{text.removeprefix('model.')}"


GEMMA_VISION = {
    "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8,
    "num_key_value_heads": 2, "patch_size": 2, "position_embedding_size": 64, "pooling_kernel_size": 1,
}  # fmt: skip


def write_gemma_4(folder: Path, text: str = "gemma-4") -> Path:
    """Tokens that stand for what is not text are outside of the vocabulary: they are embedded as padding."""
    whole = Gemma4Config(text_config=config(text, pad_token_id=0).to_dict(), vision_config=GEMMA_VISION)
    torch.manual_seed(1)
    fill(Gemma4ForConditionalGeneration(whole)).save_pretrained(folder)
    return folder


def write_multimodal(folder: Path, *, dtype: torch.dtype = torch.float32, precise: bool = False) -> Path:
    """precise: what the hub's files of Qwen3.5 hold in fp32 beside bf16."""
    text = config("qwen3.5").to_dict()
    whole = Qwen3_5Config(text_config=text, vision_config=VISION, image_token_id=1, video_token_id=2)
    torch.manual_seed(1)
    model = fill(Qwen3_5ForConditionalGeneration(whole)).to(dtype)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if precise:
        tensors |= {n: t.float() for n, t in tensors.items() if n.endswith(("A_log", "linear_attn.norm.weight"))}
    mtp = {"mtp.fc.weight": torch.randn(48, 96, dtype=dtype), "mtp.norm.weight": torch.randn(48, dtype=dtype)}
    save_file(tensors | mtp, file, metadata={"format": "pt"})
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"]["mtp_num_hidden_layers"] = 1
    path.write_text(json.dumps(fields, indent=2) + "\n")
    return folder


def export(hf: Path, out: Path) -> None:
    make_engine(hf, "fp32").export_hf(out)


def train(hf: Path, checkpoint: Path) -> None:
    engine = make_engine(hf, "fp32")
    engine.forward_backward(make_samples((30, 20, 9), VOCAB), TOKEN_MEAN)
    engine.optim_step()
    engine.save(checkpoint)
