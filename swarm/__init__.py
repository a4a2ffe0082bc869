"""Train one mixture-of-experts model together, on machines that share nothing but the internet."""

__version__ = "0.1.0"
