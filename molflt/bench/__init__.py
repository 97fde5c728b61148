"""Side-by-side measurements of time and memory, a `molflt bench` command each."""
