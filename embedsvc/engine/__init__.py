"""The engine: waiting sequences, batch choice, device slots, scatter."""
