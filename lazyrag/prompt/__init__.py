"""From what a framework sends to what the model reads: known texts, chat template, token ids."""
