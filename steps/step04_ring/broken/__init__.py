"""Broken on purpose: the bug hunts of this stage, steps/workbook/exercises.toml."""
