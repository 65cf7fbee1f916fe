"""The front's side: events, commands and time around one controller."""
