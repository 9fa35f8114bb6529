"""Step 2, ``torch.utils.cpp_extension.load_inline``: C++ and CUDA in a string, compiled at the first call.

Shows: the shortest way to try a C++ or CUDA kernel. torch writes the pybind11 binding, runs ninja and imports the
result; the build stays in $TORCH_EXTENSIONS_DIR (~/.cache/torch_extensions) and is used again while the source is
the same. CPU always; CUDA too where there is a GPU and nvcc.
Run:    python examples/from_prototype_to_op/step2_load_inline.py
Expect: half a minute to a minute of compiling the first time (torch/extension.h is most of it), seconds afterwards;
        right values in float32; a clear refusal of what the prototype cannot do.
A build that was killed leaves a file named `lock` in its folder, at which the next one waits for ever: delete it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from build_cache import compiler, nvcc
from reference import check, sample
from torch.utils.cpp_extension import load_inline

CPP = r"""
torch::Tensor gelu_cpu(const torch::Tensor& x) {
  TORCH_CHECK(x.is_cpu() && x.scalar_type() == torch::kFloat && x.is_contiguous(),
              "gelu_cpu: this prototype takes a contiguous float32 tensor on the CPU");
  torch::Tensor y = torch::empty_like(x);
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  at::parallel_for(0, x.numel(), 8192, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float v = in[i];
      out[i] = v / (1.0f + std::exp(-1.5957691216057308f * (v + 0.044715f * v * v * v)));
    }
  });
  return y;
}
"""

CUDA_DECLARATION = "torch::Tensor gelu_cuda(const torch::Tensor& x);"
CUDA = r"""
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

__global__ void gelu_kernel(const float* in, float* out, int64_t elements) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < elements) {
    const float v = in[i];
    out[i] = v / (1.0f + expf(-1.5957691216057308f * (v + 0.044715f * v * v * v)));
  }
}

torch::Tensor gelu_cuda(const torch::Tensor& x) {
  TORCH_CHECK(x.is_cuda() && x.scalar_type() == torch::kFloat && x.is_contiguous() && x.numel() > 0,
              "gelu_cuda: this prototype takes a contiguous, non-empty float32 tensor on a CUDA device");
  torch::Tensor y = torch::empty_like(x);
  const int64_t blocks = (x.numel() + 255) / 256;
  gelu_kernel<<<blocks, 256, 0, c10::cuda::getCurrentCUDAStream()>>>(
      x.data_ptr<float>(), y.data_ptr<float>(), x.numel());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return y;
}
"""


@cache
def extension() -> Any:
    """The compiled module. load_inline passes no -O flag of its own: without -O3 the CPU loop is not optimised.

    Without -fopenmp, at::parallel_for runs on one thread.
    """
    compiler()
    with_cuda = nvcc() is not None
    return load_inline(
        name="from_prototype_to_op_inline",
        cpp_sources=[CPP, CUDA_DECLARATION] if with_cuda else [CPP],
        cuda_sources=[CUDA] if with_cuda else None,
        functions=["gelu_cpu", "gelu_cuda"] if with_cuda else ["gelu_cpu"],
        extra_cflags=["-O3", "-fopenmp"],
        extra_ldflags=["-fopenmp"],
    )


_module = extension()
_by_device = {"cpu": _module.gelu_cpu, "cuda": getattr(_module, "gelu_cuda", None)}


def gelu(x: torch.Tensor) -> torch.Tensor:
    """GELU of a contiguous float32 tensor."""
    kernel = _by_device[x.device.type]
    if kernel is None:
        raise RuntimeError("step 2 was built without CUDA: put nvcc on the PATH, or set CUDA_HOME")
    return kernel(x)  # type: ignore[no-any-return]


def main() -> None:
    for device in [torch.device("cpu"), *([torch.device("cuda")] if _by_device["cuda"] else [])]:
        x = sample(3, 1000).to(device)
        check("step 2, load_inline", gelu(x), x)
    try:
        gelu(x.t())
    except RuntimeError as error:
        print(f"refused: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    main()
