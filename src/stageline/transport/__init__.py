"""Moving values between ranks: a small protocol, and its implementations. Transports know no schedule."""
