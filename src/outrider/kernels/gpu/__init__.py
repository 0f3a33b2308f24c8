"""Triton kernels. The reference of each is in kernels/, in the file that chooses between the two.
A row's result depends on that row alone in all of them: not on how many rows are computed with it."""
