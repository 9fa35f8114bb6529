#!/bin/sh
# Builds libfaulty_ops.so beside this file (or into the folder given) for the torch of the python given.
#   build.sh [PYTHON] [FOLDER]
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${1:-python3}
target=${2:-$here}
include=$("$python" -c 'import importlib.util, pathlib; print(pathlib.Path(importlib.util.find_spec("torch").origin).parent / "include")')
lib=$(dirname "$include")/lib
mkdir -p "$target"
# Stands in for libtorch_cuda.so at link time, so that a CPU build of torch will do.
printf '%s\n' \
  'extern "C" int aoti_torch_get_current_cuda_stream(int, void**) { return 1; }' \
  'extern "C" int torch_c10_cuda_check_msg(int, const char*, const char*, unsigned, bool, char**) { return 1; }' \
  'extern "C" void torch_c10_cuda_free_error_msg(char*) {}' > "$target/torch_cuda.cpp"
c++ -shared -fPIC "$target/torch_cuda.cpp" -o "$target/libtorch_cuda.so"
nvcc -std=c++20 -O2 -shared -Xcompiler -fPIC,-fvisibility=hidden -gencode arch=compute_90,code=sm_90 \
  --expt-relaxed-constexpr --cudart static -DUSE_CUDA -DTORCH_TARGET_VERSION=0x020b000000000000 -DTORCH_STABLE_ONLY \
  -isystem "$include" "$here/faulty_ops.cu" -L"$lib" -L"$target" -ltorch_cpu -ltorch_cuda -o "$target/libfaulty_ops.so"
rm -f "$target/torch_cuda.cpp" "$target/libtorch_cuda.so"
