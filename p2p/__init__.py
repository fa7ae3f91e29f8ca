"""Bytes, hashes and topics over libp2p; knows nothing of tensors or rounds."""
