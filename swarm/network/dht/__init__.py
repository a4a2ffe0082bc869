"""hivemind's DHT with bounds: signed records, charged to the peer that stores them."""
