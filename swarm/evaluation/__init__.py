"""Evaluates an exported model: held-out loss, tasks of lm-evaluation-harness, scores."""
