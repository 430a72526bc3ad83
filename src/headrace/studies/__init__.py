"""Matched comparisons and what a person reads of runs: curves, reports."""
