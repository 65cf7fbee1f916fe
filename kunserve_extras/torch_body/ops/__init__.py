"""What a decoder layer is made of, in torch: any device, any library."""
