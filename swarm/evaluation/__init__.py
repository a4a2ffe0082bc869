"""How good an exported model is: its held-out loss, tasks of lm-evaluation-harness, scores."""
