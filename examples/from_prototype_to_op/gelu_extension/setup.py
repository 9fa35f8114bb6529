"""Builds the pybind11 module ``gelu_extension``: python setup.py build_ext --inplace.

CPU always; with the CUDA kernels where torch sees a GPU and a CUDA toolkit.
"""

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

with_cuda = torch.cuda.is_available() and CUDA_HOME is not None
kind = CUDAExtension if with_cuda else CppExtension

setup(
    name="gelu_extension",
    version="0.1.0",
    ext_modules=[
        kind(
            "gelu_extension",
            ["gelu.cpp", *(["gelu_cuda.cu"] if with_cuda else [])],
            define_macros=[("WITH_CUDA", None)] if with_cuda else [],
            # Without -fopenmp, at::parallel_for runs on one thread.
            extra_compile_args={"cxx": ["-O3", "-fopenmp"], "nvcc": ["-O3"]},
            extra_link_args=["-fopenmp"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
)
