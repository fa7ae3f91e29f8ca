"""The idle policy's sensors."""
