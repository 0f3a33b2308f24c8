"""The proof that speculative output is what the target alone says: run it on any target with any drafter."""
