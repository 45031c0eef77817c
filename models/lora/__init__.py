"""Adapters of low rank (LoRA, arXiv:2106.09685): their keys, factors and products."""
