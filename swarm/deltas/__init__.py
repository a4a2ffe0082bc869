"""How a unit's move becomes few bytes, and how everybody makes the same value of them."""
