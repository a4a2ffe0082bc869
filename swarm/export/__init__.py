"""What a person takes away from a run: an agreed model as a folder that Transformers loads."""
