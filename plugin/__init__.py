"""Hand-written C++/CUDA kernels as first-class citizens of `torch.compile`."""
