"""Kinds that have a name, a code and a page, and that nothing here looks for yet: a reader may meet them all the
same."""
