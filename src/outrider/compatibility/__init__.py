"""What vLLM's arguments mean here: those that work, those without effect, and those that are refused, with why.
The tables are what the code goes by, and docs/compatibility.md is made from them."""
