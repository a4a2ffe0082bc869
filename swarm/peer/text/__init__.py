"""A run's text, tokenizer and initial weights at one peer."""
