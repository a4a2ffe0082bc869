"""Bytes and seconds of engines, predicted before they are made, and the choice between them."""
