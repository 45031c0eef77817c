import isoloss.parallel  # noqa: F401 (before the first import of Megatron-Core, whatever is imported from here)
