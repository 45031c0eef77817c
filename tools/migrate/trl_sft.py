"""TRL's SFTConfig, in our keys. Names and defaults: trl/trainer/sft_config.py; the loss: trl/trainer/sft_trainer.py
and transformers' count of the items of an accumulated batch (Trainer.get_batch_samples).
"""

from typing import Any

from isoloss.tools.migrate import trl_common
from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.table import UNSET, Settings, Source, changes, none, to
from isoloss.tools.migrate.trl_common import window


def length(s: Settings) -> Any:
    return s.optional("max_length") or UNSET


def packing(s: Settings) -> bool:
    return s.flag("packing")


def max_tokens(s: Settings) -> Any:
    most = s.optional("max_length")
    return s.integer("per_device_train_batch_size") * most if most else UNSET


def lost_packing(s: Settings) -> str | None:
    if not packing(s):
        return None
    return (
        "isoloss always packs, and batch.global_size counts rows of the data, not packed ones: multiply it by the rows "
        "that fit into max_length on average"
    )


def lost_mask(key: str, meaning: str):
    def lost(s: Settings) -> str | None:
        return meaning if s.named(key) is False else None

    return lost


def loss(s: Settings) -> tuple[Denominator, list[str]]:
    told = []
    whole = s.flag("average_tokens_across_devices")
    if packing(s) and s.text("packing_strategy") == "wrapped":
        told.append("packing_strategy=wrapped lets a row attend to its neighbours; here each attends to itself")
    own = s("loss_type") not in (None, "nll", "chunked_nll")
    return Denominator("token-mean", scope="step" if whole else "rank", own_loss=own), told


KEYS = {
    **trl_common.KEYS,
    "data.max_length": length,
    "data.overlong": lambda s: "truncate" if s.optional("max_length") else "error",
    "batch.global_size": window,
    "batch.max_tokens": max_tokens,
    "loss.aggregation": lambda s: "token-mean",
}

OVERRIDDEN = {"learning_rate": 2e-5}
ROWS = (
    to("learning_rate", "optim.lr optim.min_lr", 2e-5),
    to("max_length", "data.max_length data.overlong batch.max_tokens", 1024),
    to("max_seq_length", "data.max_length"),
    to("packing", "batch.global_size", False, lost_packing, "give"),
    *changes("rows are always packed, each attending to itself alone, and none is cut for it", "packing_strategy",
             neutral=("bfd",), when=packing),
    *none("rows are always packed, each attending to itself alone, and none is cut for it",
          "eval_packing", "padding_free", neutral=(None,)),
    to("loss_type", "loss.aggregation", None,
       lambda s: None if s("loss_type") in (None, "nll", "chunked_nll") else
       "isoloss's recipe has cross-entropy; another supervised loss is a function for the engine (docs/train.md)",
       "result"),
    to("average_tokens_across_devices", "loss.aggregation", True),
    to("assistant_only_loss", "loss.aggregation", False, lost_mask(
        "assistant_only_loss", "targets are what the assistant says; give rows of text for all tokens"), "result"),
    to("completion_only_loss", "loss.aggregation", None, lost_mask(
        "completion_only_loss",
        "targets are the completion; give rows of text for all tokens"), "result"),
    *changes("the end of a longer row is cut off", "truncation_mode", neutral=("keep_start",)),
    *none("the template is the tokenizer's: put this one into model.tokenizer", "chat_template_path", neutral=(None,),
          matter="give"),
    *(row for row in trl_common.ROWS if row.key not in OVERRIDDEN),
)  # fmt: skip


def before(s: Settings) -> list[str]:
    """TRL trains on all tokens of a conversation by default."""
    of_all = not s.has("assistant_only_loss") and not s.has("completion_only_loss")
    return trl_common.before(s) + ([
        "data.train: of rows of messages TRL trained on all tokens (assistant_only_loss was not given), and isoloss "
        "trains on what the assistant says; give rows of text for all tokens"
    ] if of_all else [])  # fmt: skip


SOURCE = Source("TRL", ROWS, KEYS, lambda s: "sft", loss, before)
