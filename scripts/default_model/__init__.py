"""The making of Outrider's embedded default: teacher text, tokenizer, tiny target, EAGLE-3 drafter, measurement."""
