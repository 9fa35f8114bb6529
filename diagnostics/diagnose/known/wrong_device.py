"""OG603 wrong-device: no device guard.

What it is
----------
A kernel that launches on the current device although its tensors are on another, or gives its output there.

Why it matters
--------------
With two GPUs it reads memory of the wrong one: an illegal access, often only in the backward, often reported
elsewhere.

Example
-------
::

    at::Tensor y = at::empty(x.sizes(), at::kCUDA);            // OG603: device 0, wherever x is

Mended
------
::

    c10::cuda::CUDAGuard guard(x.device());
    at::Tensor y = at::empty_like(x);

Remedies
--------
``add-device-guard``
    Set the device of the first tensor for the length of the call, and allocate from an input. Price: none.
"""

KIND = "wrong-device"
