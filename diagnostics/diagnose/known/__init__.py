"""Kinds that have a name, a code and a page of their own here, because what finds them is no rule file of that name:
``FOUND_BY`` says who does."""
