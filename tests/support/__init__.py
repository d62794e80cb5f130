"""Helpers of the tests. The head of each file says what it is for."""
