"""Broken on purpose: the bug hunt of this stage, steps/workbook/exercises.toml."""
