"""A run's text, tokenizer and initial weights, as one peer has them."""
