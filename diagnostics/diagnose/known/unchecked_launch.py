"""OG604 unchecked-launch: a failed launch goes unnoticed.

What it is
----------
A launch whose error is not asked for.

Why it matters
--------------
A grid of zero blocks or a block of 2048 threads does nothing, the output keeps what the memory held, and the error
comes up in some later call.

Example
-------
::

    my_kernel<<<grid, block, 0, stream>>>(x, y, n);            // OG604

Mended
------
::

    my_kernel<<<grid, block, 0, stream>>>(x, y, n);
    C10_CUDA_KERNEL_LAUNCH_CHECK();

Remedies
--------
``check-launch``
    Ask for the launch's error right after it. Price: a few nanoseconds.
"""

KIND = "unchecked-launch"
