"""The stubs for CUDA leave alone what is not Megatron's."""

import subprocess
import sys

# A process of its own: PyTorch lists its factories once a process.
PROGRAM = """
import isoloss.parallel, megatron.core, torch
with torch.device("meta"):
    made = [torch.tensor([1.0]), torch.empty(2), torch.arange(2), torch.nn.Linear(2, 2).weight]
assert all(t.is_meta for t in made), made
"""


def test_factories_still_obey_a_device_context():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
