"""Build one kernel of NVIDIA's apex, fused_weight_gradient_mlp_cuda, as a wheel:

    python recipes/containers/apex_kernel.py APEX_CHECKOUT FOLDER_OF_THE_WHEEL

It is all that a run can use of apex (parallel.gradient_accumulation_fusion=true without Transformer Engine). apex's own
APEX_CUDA_EXT=1 builds it among others, and installs apex's Python package. Needs the torch that it is for, and nvcc of
that torch's CUDA.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CUDAExtension

NAME = "fused_weight_gradient_mlp_cuda"
# As in apex's setup.py, read at the commit that the Dockerfile names.
SOURCES = (
    "csrc/megatron/fused_weight_gradient_dense.cpp",
    "csrc/megatron/fused_weight_gradient_dense_cuda.cu",
    "csrc/megatron/fused_weight_gradient_dense_16bit_prec_cuda.cu",
)
NVCC = (
    "-O3", "-U__CUDA_NO_HALF_OPERATORS__", "-U__CUDA_NO_HALF_CONVERSIONS__", "--expt-relaxed-constexpr",
    "--expt-extended-lambda", "--use_fast_math",
)  # fmt: skip


def main() -> None:
    checkout, wheels = (Path(argument).absolute() for argument in sys.argv[1:])
    os.chdir(checkout)  # sources are named from there, and so is what is built
    extension = CUDAExtension(
        NAME,
        sources=list(SOURCES),
        include_dirs=[str(checkout / "csrc")],
        extra_compile_args={"cxx": ["-O3"], "nvcc": list(NVCC)},
    )
    setup(
        name="apex-weight-gradient",
        version="1",
        packages=[],  # not those of the checkout
        py_modules=[],
        ext_modules=[extension],
        cmdclass={"build_ext": BuildExtension},
        script_args=["--quiet", "bdist_wheel", "--dist-dir", str(wheels)],
    )


if __name__ == "__main__":
    main()
