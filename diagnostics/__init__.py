"""Diagnosis and measurement."""
