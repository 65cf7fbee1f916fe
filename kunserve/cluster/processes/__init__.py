"""The instances' processes: started, watched, replaced, taken over, ended."""
