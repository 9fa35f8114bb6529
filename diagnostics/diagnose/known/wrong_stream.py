"""OG601 wrong-stream: a kernel that does not launch on the current stream.

What it is
----------
A CUDA kernel launched without a stream argument, on the default stream or on one of its own.

Why it matters
--------------
torch runs the work before and after it on the current stream, so the kernel reads what is not written yet. Under CUDA
graphs the launch is not captured at all. With one stream and small inputs it looks right, and ``opcheck`` passes.

Example
-------
::

    my_kernel<<<grid, block>>>(x, y, n);                      // OG601: the default stream

Mended
------
::

    my_kernel<<<grid, block, 0, at::cuda::getCurrentCUDAStream()>>>(x, y, n);

Remedies
--------
``use-current-stream``
    Pass the current stream of the tensor's device to every launch, copy and library handle. Price: none.
"""

KIND = "wrong-stream"
