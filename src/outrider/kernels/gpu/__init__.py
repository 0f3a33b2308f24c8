"""Triton kernels, one operation per file, each with a reference in the file of the same name one folder up.
A row's result depends on that row alone in all of them: not on how many rows are computed with it."""
