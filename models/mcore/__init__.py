"""What is built on Megatron-Core: the model, its layers, its parameters."""
