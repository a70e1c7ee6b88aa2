"""Text in and out: tokenizer, chat templates, streaming detokeniser, stop strings."""
