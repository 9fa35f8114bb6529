// Every kernel behind its plain C++ signature. Schemas are in schemas.cpp; the kernels know nothing of registration.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>

namespace opgraft {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
// Of u, delta, A, B, C, D, z, delta_bias and the initial state.
using SelectiveGradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

namespace cpu {
Tensor gelu(const Tensor& x);
Tensor gelu_backward(const Tensor& grad, const Tensor& x);
Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim, bool reverse);
std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad, const Tensor& decay, const Tensor& output,
                                                        const OptionalTensor& initial, int64_t dim, bool reverse);
// channel_last: x is (batch, length, channels), else (batch, channels, length). States are (batch, channels, steps).
std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& initial_state, const OptionalTensor& seq_idx, bool silu,
                                         bool channel_last);
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const OptionalTensor& grad_final,
                                                                  const Tensor& x, const Tensor& weight,
                                                                  const OptionalTensor& bias,
                                                                  const OptionalTensor& initial_state,
                                                                  const OptionalTensor& seq_idx, bool silu,
                                                                  bool channel_last);
std::tuple<Tensor, Tensor> causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight,
                                                const OptionalTensor& bias, bool silu);
Tensor causal_conv1d_update_(const Tensor& x, Tensor state, const Tensor& weight, const OptionalTensor& bias,
                             bool silu);
std::tuple<Tensor, Tensor> selective_scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                          const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                          const OptionalTensor& delta_bias, bool delta_softplus,
                                          const OptionalTensor& initial_state);
SelectiveGradients selective_scan_backward(const Tensor& grad, const OptionalTensor& grad_final, const Tensor& u,
                                           const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                                           const OptionalTensor& D, const OptionalTensor& z,
                                           const OptionalTensor& delta_bias, bool delta_softplus,
                                           const OptionalTensor& initial_state);
std::tuple<Tensor, Tensor> selective_scan_update(const Tensor& state, const Tensor& u, const Tensor& delta,
                                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                                 const OptionalTensor& D, const OptionalTensor& z,
                                                 const OptionalTensor& delta_bias, bool delta_softplus);
Tensor selective_scan_update_(Tensor state, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                              const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& delta_bias, bool delta_softplus);
// Rows are along the last dimension. summed: x + residual in their dtype, what add_rms_norm normalises and returns.
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset, bool cast_before_weight);
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                             double eps, double offset);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, double offset, bool cast_before_weight);
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_residual,
                                                 const Tensor& summed, const OptionalTensor& weight, double eps,
                                                 double offset);
// float8_e4m3fn and float32 scales, one a row (block 0) or one a block of 128.
std::tuple<Tensor, Tensor> rms_norm_fp8(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                                        bool cast_before_weight, int64_t block, std::optional<double> scale_upper_bound,
                                        bool power_of_two);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fp8(const Tensor& x, const Tensor& residual,
                                                    const OptionalTensor& weight, double eps, double offset,
                                                    bool cast_before_weight, int64_t block,
                                                    std::optional<double> scale_upper_bound, bool power_of_two);
std::tuple<Tensor, Tensor> silu_mul_fp8(const Tensor& gate, const Tensor& up, int64_t block,
                                        std::optional<double> scale_upper_bound, bool power_of_two);
// Loss, log-sum-exp of every row, and the row statistics (2, ...) that the backward starts from.
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 int64_t reduction);
// The same, and the gradient for an incoming gradient of one.
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_gradient(const Tensor& logits, const Tensor& target,
                                                                       const OptionalTensor& weight,
                                                                       int64_t ignore_index, double label_smoothing,
                                                                       double z_loss, double softcap,
                                                                       int64_t reduction);
Tensor cross_entropy_backward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Tensor& statistics, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                              int64_t reduction);
// Makes the gradient that cross_entropy_with_gradient gave right for grad_loss. Where that is one, nothing is to do.
void cross_entropy_rescale_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                            const OptionalTensor& weight, const Tensor& statistics, int64_t ignore_index,
                            double label_smoothing, double z_loss, double softcap, int64_t reduction);
}  // namespace cpu

namespace cuda {
Tensor gelu(const Tensor& x);
Tensor gelu_backward(const Tensor& grad, const Tensor& x);
Tensor linear_scan(const Tensor& decay, const Tensor& update, const OptionalTensor& initial, int64_t dim, bool reverse);
std::tuple<Tensor, Tensor, Tensor> linear_scan_backward(const Tensor& grad, const Tensor& decay, const Tensor& output,
                                                        const OptionalTensor& initial, int64_t dim, bool reverse);
// channel_last: x is (batch, length, channels), else (batch, channels, length). States are (batch, channels, steps).
std::tuple<Tensor, Tensor> causal_conv1d(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                         const OptionalTensor& initial_state, const OptionalTensor& seq_idx, bool silu,
                                         bool channel_last);
std::tuple<Tensor, Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const OptionalTensor& grad_final,
                                                                  const Tensor& x, const Tensor& weight,
                                                                  const OptionalTensor& bias,
                                                                  const OptionalTensor& initial_state,
                                                                  const OptionalTensor& seq_idx, bool silu,
                                                                  bool channel_last);
std::tuple<Tensor, Tensor> causal_conv1d_update(const Tensor& x, const Tensor& state, const Tensor& weight,
                                                const OptionalTensor& bias, bool silu);
Tensor causal_conv1d_update_(const Tensor& x, Tensor state, const Tensor& weight, const OptionalTensor& bias,
                             bool silu);
std::tuple<Tensor, Tensor> selective_scan(const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                                          const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                                          const OptionalTensor& delta_bias, bool delta_softplus,
                                          const OptionalTensor& initial_state);
SelectiveGradients selective_scan_backward(const Tensor& grad, const OptionalTensor& grad_final, const Tensor& u,
                                           const Tensor& delta, const Tensor& A, const Tensor& B, const Tensor& C,
                                           const OptionalTensor& D, const OptionalTensor& z,
                                           const OptionalTensor& delta_bias, bool delta_softplus,
                                           const OptionalTensor& initial_state);
std::tuple<Tensor, Tensor> selective_scan_update(const Tensor& state, const Tensor& u, const Tensor& delta,
                                                 const Tensor& A, const Tensor& B, const Tensor& C,
                                                 const OptionalTensor& D, const OptionalTensor& z,
                                                 const OptionalTensor& delta_bias, bool delta_softplus);
Tensor selective_scan_update_(Tensor state, const Tensor& u, const Tensor& delta, const Tensor& A, const Tensor& B,
                              const Tensor& C, const OptionalTensor& D, const OptionalTensor& z,
                              const OptionalTensor& delta_bias, bool delta_softplus);
// Rows are along the last dimension. summed: x + residual in their dtype, what add_rms_norm normalises and returns.
Tensor rms_norm(const Tensor& x, const OptionalTensor& weight, double eps, double offset, bool cast_before_weight);
std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad, const Tensor& x, const OptionalTensor& weight,
                                             double eps, double offset);
std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const Tensor& residual, const OptionalTensor& weight,
                                        double eps, double offset, bool cast_before_weight);
std::tuple<Tensor, Tensor> add_rms_norm_backward(const Tensor& grad, const OptionalTensor& grad_residual,
                                                 const Tensor& summed, const OptionalTensor& weight, double eps,
                                                 double offset);
// float8_e4m3fn and float32 scales, one a row (block 0) or one a block of 128.
std::tuple<Tensor, Tensor> rms_norm_fp8(const Tensor& x, const OptionalTensor& weight, double eps, double offset,
                                        bool cast_before_weight, int64_t block, std::optional<double> scale_upper_bound,
                                        bool power_of_two);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_fp8(const Tensor& x, const Tensor& residual,
                                                    const OptionalTensor& weight, double eps, double offset,
                                                    bool cast_before_weight, int64_t block,
                                                    std::optional<double> scale_upper_bound, bool power_of_two);
std::tuple<Tensor, Tensor> silu_mul_fp8(const Tensor& gate, const Tensor& up, int64_t block,
                                        std::optional<double> scale_upper_bound, bool power_of_two);
// Loss, log-sum-exp of every row, and the row statistics (2, ...) that the backward starts from.
std::tuple<Tensor, Tensor, Tensor> cross_entropy(const Tensor& logits, const Tensor& target,
                                                 const OptionalTensor& weight, int64_t ignore_index,
                                                 double label_smoothing, double z_loss, double softcap,
                                                 int64_t reduction);
// The same, and the gradient for an incoming gradient of one.
std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_with_gradient(const Tensor& logits, const Tensor& target,
                                                                       const OptionalTensor& weight,
                                                                       int64_t ignore_index, double label_smoothing,
                                                                       double z_loss, double softcap,
                                                                       int64_t reduction);
Tensor cross_entropy_backward(const Tensor& logits, const Tensor& target, const OptionalTensor& weight,
                              const Tensor& statistics, const OptionalTensor& grad_loss, const OptionalTensor& grad_lse,
                              int64_t ignore_index, double label_smoothing, double z_loss, double softcap,
                              int64_t reduction);
// Makes the gradient that cross_entropy_with_gradient gave right for grad_loss. Where that is one, nothing is to do.
void cross_entropy_rescale_(Tensor gradient, const Tensor& grad_loss, const Tensor& logits, const Tensor& target,
                            const OptionalTensor& weight, const Tensor& statistics, int64_t ignore_index,
                            double label_smoothing, double z_loss, double softcap, int64_t reduction);
}  // namespace cuda

}  // namespace opgraft
