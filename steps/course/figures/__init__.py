"""What the notebooks draw and try. A function is named after what it shows; notebooks hold the lesson alone."""
