"""The round protocol, sans-IO."""
