"""What looks at the stages: nothing that a kernel needs.

    workbook   exercises: check, hint, solution, grade
    verify     the contract on anybody's attention
    demo       every stage on real input
    bench      measurements, and the rows that were recorded
    figures    what the notebooks draw
    hub        two kernels as a folder for Hugging Face's kernels hub
"""
