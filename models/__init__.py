"""model.py is the model of a run. architecture.py describes it; families/ reads config.json, mcore/ builds the model,
weights/ and conversion/ are its files."""

import isoloss.parallel  # noqa: F401 (before the first import of Megatron-Core, whatever is imported from here)
