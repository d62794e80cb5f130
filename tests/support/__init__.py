"""What the tests use and is no test itself. The head of each file says what it is for."""
