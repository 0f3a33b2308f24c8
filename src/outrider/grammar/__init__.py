"""Structured output: from what a client asks for to the tokens that may come next. xgrammar does the matching."""
