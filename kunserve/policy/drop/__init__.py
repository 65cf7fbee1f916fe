"""Which groups drop layers, how deep, and when whole models come back."""
