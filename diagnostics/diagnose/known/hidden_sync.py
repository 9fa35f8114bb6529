"""OG602 hidden-sync: an op that waits for the device.

What it is
----------
A call inside the op that waits until the device has finished: a synchronize, a blocking copy, reading a value back.

Why it matters
--------------
The host cannot run ahead any more, so the time of every launch after it is exposed, and a CUDA graph cannot be
captured.

Example
-------
::

    cudaMemcpy(&count, device_count, 4, cudaMemcpyDeviceToHost);   // OG602

Mended
------
::

    // keep the count on the device and let the next kernel read it there

Remedies
--------
``remove-sync``
    Keep the value on the device, or allocate for the upper bound. Price: some padding.
"""

KIND = "hidden-sync"
