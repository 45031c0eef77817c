"""The part of a model built on Megatron-Core: layers, parameters, optimizer."""
