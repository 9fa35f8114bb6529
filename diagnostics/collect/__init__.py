"""torch's hooks -> events. What touches torch's private names is here and in ``_compat.py``; the rest reads events."""
