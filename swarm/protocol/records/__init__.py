"""What peers publish: records of the DHT, life events, held-out losses."""
