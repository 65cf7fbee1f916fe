"""Sans-I/O state machines that the real engine and the simulator share."""
