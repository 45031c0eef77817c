"""SGLang servers as a rollout backend.

docs/rollout.md tells the protocol, the three ways of weight synchronization, and what was run against which version.
"""

from pathlib import Path

from isoloss.engine.rl.backends.servers.backend import ServerBackend
from isoloss.engine.rl.backends.sglang.server import SGLangServer
from isoloss.engine.rl.backends.sglang.weights import weight_sync
from isoloss.engine.rl.config import RolloutConfig


class SGLangBackend(ServerBackend):
    def __init__(self, config: RolloutConfig, model: str | Path, log_folder: str | Path):
        super().__init__(config, model, log_folder, SGLangServer, weight_sync)
