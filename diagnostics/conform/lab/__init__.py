"""What the checks work with: calls and their variations, guarded memory, comparison, isolation."""
