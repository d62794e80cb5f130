"""The contract's cases on anybody's attention: `python -m steps verify FILE.py:function`."""
