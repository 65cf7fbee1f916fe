"""Words between processes: codec, sockets, keys, and the pulse of a link."""
