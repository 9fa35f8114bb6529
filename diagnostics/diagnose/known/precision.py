"""OG904 precision: results differ by rounding and not by fault.

What it is
----------
The compiled model gives slightly other numbers than eager, and the op itself gives the same in both.

Why it matters
--------------
Fused code keeps float32 between operations that eager rounds to 16 bits, so it is closer to the exact result. A
threshold or a quantiser behind it can turn the last bit into another answer.

Example
-------
::

    torch.testing.assert_close(compiled(x), eager(x), rtol=0, atol=0)      # OG904

Mended
------
::

    torch.testing.assert_close(compiled(x), exact(x.double()), rtol=1e-2, atol=1e-2)

Remedies
--------
``leave-it``
    Compare both with float64. Where eager's rounding is wanted: ``torch._inductor.config.emulate_precision_casts
    = True`` (torch >= 2.11). Price: some speed.
"""

KIND = "precision"
FOUND_BY = "`opgraft doctor`, where it holds the compiled op against eager and a float64 reference"
