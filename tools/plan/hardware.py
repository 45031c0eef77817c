"""GPUs and networks: numbers of data sheets, and the shares of them that a step is assumed to get."""

from dataclasses import dataclass

from isoloss.engine.memory.limits import GIB


@dataclass(frozen=True)
class Gpu:
    """memory: bytes that the driver shows. flops: dense bf16, a second. bandwidth: bytes of memory a second.
    nvlink, infiniband: bytes a second that one GPU sends, inside a node and between nodes.

    Source: NVIDIA's data sheets of the SXM forms, and the networks of DGX systems (ConnectX-6: 200 Gb/s, -7: 400).
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    nvlink: float
    infiniband: float


GPUS = {
    "a100": Gpu("A100 80GB", 79.3 * GIB, 312e12, 2.04e12, 300e9, 25e9),
    "h100": Gpu("H100 80GB", 79.6 * GIB, 989e12, 3.35e12, 450e9, 50e9),
    "h200": Gpu("H200 141GB", 140.4 * GIB, 989e12, 4.8e12, 450e9, 50e9),
    "b200": Gpu("B200 180GB", 178.3 * GIB, 2250e12, 7.7e12, 900e9, 50e9),
}
GPUS_PER_NODE = 8
# Bytes a second for an offloaded optimizer: Adam's stream on a node's host (two sockets of eight channels, half of the
# data sheet), and a GPU's link to the host. This assumes that every rank gets its share of the cores.
HOST_BANDWIDTH, HOST_LINK = 300e9, 50e9
# Shares of the data sheet that a step is assumed to get.
MATRIX_SHARE, ATTENTION_SHARE, MEMORY_SHARE, NETWORK_SHARE = 0.65, 0.35, 0.8, 0.8
LAUNCH_SECONDS = 5e-6  # time of the host for each op
ASSUMPTIONS = (
    f"matrix products {MATRIX_SHARE:.0%}, attention {ATTENTION_SHARE:.0%}, memory {MEMORY_SHARE:.0%} and network "
    f"{NETWORK_SHARE:.0%} of the data sheet; {1e6 * LAUNCH_SECONDS:.0f} us of the host for each op; full rows; "
    "exchanges of gradients overlap with the backward and those of weights with the forward if so configured, all "
    "others with nothing"
)
