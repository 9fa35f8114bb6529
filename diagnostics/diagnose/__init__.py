"""Events -> findings, one rule a file. Nothing here imports torch: a stored stream is an input like a live one."""
