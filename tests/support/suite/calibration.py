"""How fast this machine is, in CPU seconds of a piece of work that never changes.

CPU seconds of one test differ between machines, and on one machine with what runs beside it: a core that shares its
caches and its clock does less in a second. So the workers measure this work between tests all through a run, and
budget.py divides by the median.
"""

import gc
import time

EVERY = 30.0  # seconds between two measurements of a worker


def cpu_seconds() -> float:
    """CPU time of this thread for about a tenth of a second of what tests spend theirs on: Python, small objects, and
    small operations of torch."""
    import torch  # not before: reading a table of times needs none

    collects = gc.isenabled()
    gc.disable()  # a collection costs by what the tests before have left in memory
    try:
        began = time.thread_time()
        total = sum(number * number % 7 for number in range(250_000))
        table = {str(number): [number] for number in range(60_000)}
        matrix = torch.full((48, 48), 0.01, dtype=torch.float32, device="cpu")
        with torch.no_grad():
            for _ in range(1_500):
                matrix = torch.tanh(matrix @ matrix + 0.01)
        spent = time.thread_time() - began
        assert total and table and matrix.shape == (48, 48)
        return spent
    finally:
        if collects:
            gc.enable()
