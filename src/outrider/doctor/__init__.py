"""Why does this drafter not agree with this target? How its checkpoint was read, how often it is right, and whether
another reading of the same weights is right more often."""
