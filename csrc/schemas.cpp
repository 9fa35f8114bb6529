// Every schema of the namespace `opgraft`, and nothing else. Kernels register themselves beside their code.
// Size-like arguments are SymInt, true constants are int; every op is functional.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(opgraft, m) {
  m.def("gelu(Tensor x) -> Tensor");
  m.def("gelu_backward(Tensor grad, Tensor x) -> Tensor");
  m.def("linear_scan(Tensor decay, Tensor update, Tensor? initial=None, int dim=-1, bool reverse=False) -> Tensor");
  m.def(
      "linear_scan_backward(Tensor grad, Tensor decay, Tensor output, Tensor? initial, int dim, bool reverse) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "causal_conv1d(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, bool silu, "
      "bool channel_last) -> (Tensor, Tensor)");
  m.def(
      "causal_conv1d_backward(Tensor grad, Tensor? grad_final, Tensor x, Tensor weight, Tensor? bias, "
      "Tensor? initial_state, Tensor? seq_idx, bool silu, bool channel_last) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def("causal_conv1d_update(Tensor x, Tensor state, Tensor weight, Tensor? bias, bool silu) -> (Tensor, Tensor)");
  m.def("causal_conv1d_update_(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, bool silu) -> Tensor");
  m.def(
      "selective_scan(Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? delta_bias, "
      "bool delta_softplus, Tensor? initial_state) -> (Tensor, Tensor)");
  m.def(
      "selective_scan_backward(Tensor grad, Tensor? grad_final, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, "
      "Tensor? D, Tensor? z, Tensor? delta_bias, bool delta_softplus, Tensor? initial_state) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "selective_scan_update(Tensor state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
      "Tensor? delta_bias, bool delta_softplus) -> (Tensor, Tensor)");
  m.def(
      "selective_scan_update_(Tensor(a!) state, Tensor u, Tensor delta, Tensor A, Tensor B, Tensor C, Tensor? D, "
      "Tensor? z, Tensor? delta_bias, bool delta_softplus) -> Tensor");
  m.def(
      "rms_norm(Tensor x, Tensor? weight=None, float eps=1e-06, float offset=0.0, bool cast_before_weight=False) "
      "-> Tensor");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, float eps, float offset) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-06, float offset=0.0, "
      "bool cast_before_weight=False) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm_backward(Tensor grad, Tensor? grad_residual, Tensor summed, Tensor? weight, float eps, "
      "float offset) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_fp8(Tensor x, Tensor? weight=None, float eps=1e-06, float offset=0.0, bool cast_before_weight=False, "
      "int block=0, float? scale_upper_bound=None, bool power_of_two=False) -> (Tensor, Tensor)");
  m.def(
      "add_rms_norm_fp8(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-06, float offset=0.0, "
      "bool cast_before_weight=False, int block=0, float? scale_upper_bound=None, bool power_of_two=False) "
      "-> (Tensor, Tensor, Tensor)");
  m.def(
      "silu_mul_fp8(Tensor gate, Tensor up, int block=0, float? scale_upper_bound=None, bool power_of_two=False) "
      "-> (Tensor, Tensor)");
  m.def(
      "cross_entropy(Tensor logits, Tensor target, Tensor? weight, int ignore_index, float label_smoothing, "
      "float z_loss, float softcap, int reduction) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_with_gradient(Tensor logits, Tensor target, Tensor? weight, int ignore_index, "
      "float label_smoothing, float z_loss, float softcap, int reduction) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cross_entropy_backward(Tensor logits, Tensor target, Tensor? weight, Tensor statistics, Tensor? grad_loss, "
      "Tensor? grad_lse, int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction) "
      "-> Tensor");
  m.def(
      "cross_entropy_rescale_(Tensor(a!) gradient, Tensor grad_loss, Tensor logits, Tensor target, Tensor? weight, "
      "Tensor statistics, int ignore_index, float label_smoothing, float z_loss, float softcap, int reduction) "
      "-> ()");
}
