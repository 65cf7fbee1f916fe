"""From files to packed tensors: layout, readers, loading."""
