"""Measurement: arms to samples, samples to intervals, intervals and compiled graphs to a ledger."""
