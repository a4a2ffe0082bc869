"""What engines need before they are made: bytes, seconds, and the choice between them."""
