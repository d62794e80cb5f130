"""Sheets and notebooks under my/ that an earlier version wrote import their names from here."""

from steps.course.workbook import *  # noqa: F403
