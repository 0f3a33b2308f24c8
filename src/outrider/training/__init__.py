"""`outrider train`: a drafter for any target, trained in the process that serves it, judged by what it brings there."""
