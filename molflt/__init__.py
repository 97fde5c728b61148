"""molflt: linear-cost attention with learned Fourier relative positional encodings."""
