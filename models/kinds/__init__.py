"""Kinds of attention and of MLP, a file each: what a layer holds and all that follows from it.

None of them knows Megatron-Core: the module that computes a kind is found in `isoloss.models.mcore.modules`.
"""
