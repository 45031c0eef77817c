"""Rotary positions from a config.json, in the spelling of transformers 4 (`rope_theta`, `rope_scaling`) and of
transformers 5 (`rope_parameters`)."""

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from isoloss.models.families.hf_fields import ConfigJson, flag, positive_int, positive_number, refuse
from isoloss.models.rope import LinearScaling, Llama3Scaling, QueryScaling, Rope, YarnScaling

ROPE_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate", "attention_factor",
             "mscale", "mscale_all_dim"),
}  # fmt: skip
# Those of a family whose queries are scaled: one is read by `scaled_queries`, the other means nothing.
SCALED_QUERIES = frozenset({"llama_4_scaling_beta", "max_position_embeddings"})
DEFAULT_THETA = 10000.0  # what transformers takes where the file says nothing (Llama 1 and 2)


def rotary_dim(config: ConfigJson, head_dim: int, default: float | None) -> int:
    given = config.get("rope_parameters") or config.get("rope_scaling")
    inner = given.get("partial_rotary_factor") if isinstance(given, Mapping) else None
    if isinstance(given, Mapping) and "partial_rotary_factor" in given and inner is None:
        refuse("partial_rotary_factor", None, "means nothing within rope_parameters; state it, or leave it out")
    outer = config.get("partial_rotary_factor")
    if inner is not None and outer is not None and inner != outer:
        refuse("partial_rotary_factor", outer, f"contradicts rope_parameters.partial_rotary_factor={inner!r}")
    fraction = inner if outer is None else outer
    if fraction is None:
        fraction = 1 if default is None else default
    if default is None and fraction != 1:
        refuse("partial_rotary_factor", fraction, "is not supported for this family; only 1.0 is")
    if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
        refuse("partial_rotary_factor", fraction, "must be a number greater than 0 and at most 1")
    if int(head_dim * fraction) % 2 or not int(head_dim * fraction):
        refuse("partial_rotary_factor", fraction, f"rotates an odd number of the {head_dim} channels of a head")
    return int(head_dim * fraction)


def rope(
    config: ConfigJson, theta_default: float, max_positions: int, interleaved: bool, irrelevant: Set[str] = frozenset()
) -> Rope:
    """irrelevant: parameters that may stand there, and mean nothing for text."""
    if config.get("rope_parameters") is not None and config.get("rope_scaling") is not None:
        refuse("rope_scaling", config["rope_scaling"], "stands beside rope_parameters; keep one of them")
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    given = config.get(name)
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        refuse(name, given, "must be an object with rope_type and its parameters")
    inside = f"{name}."
    theta = _rope_theta(config, given, inside, theta_default)
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        refuse(inside + "type", given["type"], f"contradicts rope_type={kind!r}; keep one of them")
    if kind not in tuple(ROPE_PARAMETERS):  # a tuple: the file may hold something unhashable
        refuse(inside + "rope_type", kind, f"is not supported; one of {', '.join(ROPE_PARAMETERS)} is")
    known = {*ROPE_PARAMETERS[kind], "rope_type", "type", "rope_theta", "partial_rotary_factor"} | irrelevant
    for field, value in given.items():
        if field not in known:
            refuse(inside + field, value, f"is not a parameter of rope_type {kind!r} that is supported; delete it")
    return Rope(theta, _rope_scaling(kind, given, inside, max_positions, latent=interleaved), interleaved)


def scaled_queries(config: ConfigJson, rope: Rope) -> Rope:
    """With Llama 4's scaling of queries, whose original length is YaRN's."""
    name = "rope_parameters" if config.get("rope_parameters") is not None else "rope_scaling"
    beta = positive_number(config[name], "llama_4_scaling_beta", f"{name}.")
    if not isinstance(rope.scaling, YarnScaling):
        refuse(f"{name}.llama_4_scaling_beta", beta, "is supported together with rope_type 'yarn' only")
    return replace(rope, query_scaling=QueryScaling(beta, rope.scaling.original_max_position_embeddings))


def _rope_scaling(
    kind: str, given: Mapping[str, Any], inside: str, max_positions: int, latent: bool
) -> Llama3Scaling | LinearScaling | YarnScaling | None:
    if kind == "default":
        return None
    factor = positive_number(given, "factor", inside)
    if kind == "linear":
        return LinearScaling(factor)
    if kind == "yarn":
        return _yarn(given, factor, inside, max_positions, latent)
    low, high = (positive_number(given, f"{end}_freq_factor", inside) for end in ("low", "high"))
    if high <= low:
        refuse(inside + "high_freq_factor", high, f"must be greater than low_freq_factor={low}")
    return Llama3Scaling(factor, low, high, positive_int(given, "original_max_position_embeddings", inside))


def _yarn(given: Mapping[str, Any], factor: float, inside: str, max_positions: int, latent: bool) -> YarnScaling:
    """transformers' defaults and its use of mscale; only latent attention scales its softmax by mscale_all_dim."""
    optional = {name: given.get(name) for name in ("attention_factor", "beta_fast", "beta_slow")}
    fast, slow = (
        default if optional[name] is None else positive_number(given, name, inside)
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    )
    mscale, all_dim = (
        0.0 if (value := given.get(name)) in (None, False) else value for name in ("mscale", "mscale_all_dim")
    )
    for name, value in (("mscale", mscale), ("mscale_all_dim", all_dim)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            refuse(inside + name, value, "must be a number")

    def scale(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1.0

    if optional["attention_factor"] is not None:
        cos_sin = float(positive_number(given, "attention_factor", inside))
    else:
        cos_sin = scale(mscale) / scale(all_dim) if mscale and all_dim else scale(1.0)
    original = given.get("original_max_position_embeddings")
    if original is not None:
        original = positive_int(given, "original_max_position_embeddings", inside)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=max_positions if original is None else original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=flag(given, "truncate", True),
        cos_sin_factor=cos_sin,
        softmax_factor=scale(all_dim) ** 2 if latent and all_dim else 1.0,
    )


def _rope_theta(config: ConfigJson, given: Mapping[str, Any], inside: str, default: float) -> float:
    outer = config.get("rope_theta")
    if given.get("rope_theta") is not None:
        theta = positive_number(given, "rope_theta", inside)
        if outer is not None and outer != theta:
            refuse("rope_theta", outer, f"contradicts {inside}rope_theta={theta}; keep one of them")
        return float(theta)
    if "rope_theta" in given and outer is None:
        refuse(inside + "rope_theta", None, f"means nothing; state it, or leave it out for {default}")
    return default if outer is None else float(positive_number(config, "rope_theta"))
