// The `out` overloads on the CPU.
#include <torch/csrc/stable/library.h>

#include "ops.h"
#include "support/planned.h"

STABLE_TORCH_LIBRARY_IMPL(opgraft, CPU, m) {
  using namespace opgraft::cpu;
#include "out_variants.inc"
}
