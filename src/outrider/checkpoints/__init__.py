"""Reading files: checkpoints of every format and what is in them, and models built and filled from them."""
