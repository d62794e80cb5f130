"""What the tests use and is no test itself.

    contract_suite.py        the contract as a test class, from which each stage's tests are derived
    planted_mistakes.toml    mistakes that the workbook has to recognise
    sanitized_kernels.py     a command for a GPU: one kernel of stage 02 at small sizes, for NVIDIA's sanitizers
"""
