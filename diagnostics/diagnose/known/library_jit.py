"""OG704 library-jit: the kernel's library compiles while the model runs.

What it is
----------
A kernel library that builds or tunes a kernel at the first call with a new shape or dtype.

Why it matters
--------------
Single steps take seconds among steps of milliseconds; a benchmark that meets one says nothing.

Example
-------
::

    for batch in loader:                  # OG704: the last, smaller batch is compiled for in the middle of the epoch
        step(batch)

Mended
------
::

    for size in (64, 32):                 # every shape that will come, before it counts
        step(example(size))

Remedies
--------
``warm-up-first``
    Call the kernel once with every shape that will come, before measuring and before serving. Price: start-up
    time.
"""

KIND = "library-jit"
FOUND_BY = "the reader: single slow steps that no compile of torch explains; nothing here looks for it by itself yet"
