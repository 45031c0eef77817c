"""Process groups, sharding and the loss normalizer. Importing it lets Megatron-Core run without a GPU."""

import warnings

from isoloss.parallel import host

host.install()
# Megatron-Core announces at import every optional package (Transformer Engine, apex, ...) that it does without.
for _module in ("megatron", "torch.distributed"):
    warnings.filterwarnings("ignore", module=_module)

from isoloss.parallel.errors import UserError  # noqa: E402
from isoloss.parallel.mesh import Layout, Mesh  # noqa: E402
from isoloss.parallel.normalizer import GlobalLossNormalizer  # noqa: E402

__all__ = ["GlobalLossNormalizer", "Layout", "Mesh", "UserError"]
