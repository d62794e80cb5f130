"""Measuring attention: what it must cost, what it does cost, and how that is recorded and drawn."""
