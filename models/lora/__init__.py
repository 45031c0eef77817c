"""Adapters of low rank (LoRA, arXiv:2106.09685): their keys, factors, files and arithmetic.

Nothing here knows Megatron-Core: `isoloss.models.mcore.lora` computes with the factors.
"""
