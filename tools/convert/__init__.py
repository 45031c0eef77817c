"""isoloss-convert: checkpoints from and to Hugging Face."""
