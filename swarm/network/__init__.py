"""All that crosses the wire; the only package that imports hivemind."""
