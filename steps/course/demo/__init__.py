"""The demo: `python -m steps demo` trains a small model and runs its attention through every stage.

    model.py     the model, which makes real input for the stages
    pages.txt    what the model is trained on, and readme.txt what the stages are run on: copies of pages, never edited
    compare.py   one stage on that input, compared with the float64 reference and with torch's own attention
    readme.py    `python -m steps.course.demo.readme` writes README.md's tables and its picture of the stages
"""
