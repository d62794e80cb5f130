"""What the tests use and is no test itself.

    compile_triton.py        a command: compiles stage 03's kernels for GPUs that need not be there
    contract_suite.py        the contract as a test class, from which each stage's tests are derived
    contracting_interpreter.py  lets Triton's interpreter round a product and a sum once, as compiled Triton does
    operands.py              places in memory for an operand that is unlike the others
    preloaded_kernel.py      Jupyter kernels that start at once, for the notebooks' tests
    sanitized_kernels.py     a command for a GPU: one kernel of stage 02 at small sizes, for NVIDIA's sanitizers
    sanitized_triton.py      the same for the kernels of a file of stage 03
"""
