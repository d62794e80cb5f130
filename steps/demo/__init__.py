"""The demo: `python -m steps demo` trains a small model and runs its attention through every stage.

    model.py     the model, which makes real input for the stages
    compare.py   one stage on that input, compared with the float64 reference and with torch's own attention
    readme.py    `python -m steps.demo.readme` writes README.md's table and picture of the stages, and tables of rungs
"""
