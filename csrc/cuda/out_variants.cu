// The `out` overloads on CUDA.
#include <torch/csrc/stable/library.h>

#include "ops.h"
#include "support/planned.h"

STABLE_TORCH_LIBRARY_IMPL(opgraft, CUDA, m) {
  using namespace opgraft::cuda;
#include "out_variants.inc"
}
